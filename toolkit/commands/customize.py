"""``toolkit customize``: packages added to an image, where there is no Docker."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from toolkit import config
from toolkit.commands.display import message
from toolkit.commands.import_image import fetch
from toolkit.commands.options import Cluster, OnNode, wants_node
from toolkit.common.secrets import hide_logins
from toolkit.errors import UsageError


def customize(
    *,
    source: Annotated[
        str, typer.Option("--from", help="Image reference, imported first, or .sqsh file.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The .sqsh file to make.")],
    pip: Annotated[
        list[str] | None, typer.Option(help="A package, as pip install takes it; repeatable.")
    ] = None,
    requirements: Annotated[Path | None, typer.Option(help="A requirements file for pip.")] = None,
    apt: Annotated[list[str] | None, typer.Option(help="A Debian package; repeatable.")] = None,
    script: Annotated[
        Path | None, typer.Option(help="A script, run last, as the container's root.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    images: Annotated[str | None, typer.Option(help="Folder of imported images.")] = None,
    on: OnNode = "local",
    partition: Annotated[
        str | None, typer.Option("-p", "--partition", help="Partition, with --on slurm.")
    ] = None,
    account: Annotated[
        str | None, typer.Option("-A", "--account", help="Account, with --on slurm.")
    ] = None,
    cluster: Cluster = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would run in the container.")
    ] = False,
) -> None:
    """Make a new image: unpack one, add packages, save it. A failure leaves no file.

    The image holds /etc/toolkit-customized.jsonl, which says what it came from and what was added.
    """
    from toolkit.enroot import customize as making
    from toolkit.enroot import images as stored
    from toolkit.enroot import site
    from toolkit.slurm import helper

    added = making.Additions(
        apt=tuple(apt or ()),
        pip=tuple(pip or ()),
        requirements=_text(requirements, "--requirements"),
        script=_text(script, "--script"),
    )
    if not added.as_dict():
        raise UsageError("nothing to add: give --pip, --requirements, --apt or --script.")
    on_node = wants_node(on)
    if dry_run:
        print(hide_logins(making.install_script(added, {"from": source})), end="")
        return
    cwd = Path.cwd()
    given = {"images": images, "partition": partition, "account": account}
    settings = config.settings(given, os.environ, cwd, cluster)
    folder = stored.Images(stored.folder(config.value(settings, "images"), cwd))
    srun = helper.srun_argv(settings, "toolkit-customize") if on_node else ()
    file, origin = _source(source, folder, srun)
    environ = helper.helper_environment(os.environ)
    making.make(
        file, cwd / output, added, site=site.find(os.environ), environ=environ,
        say=message, origin=origin, srun=srun, force=force,
    )  # fmt: skip
    print(cwd / output)


def _source(name: str, folder: Any, srun: tuple[str, ...]) -> tuple[Path, dict[str, Any]]:
    """The file of an image, and what the record says of it."""
    from toolkit.image import reference

    parsed = reference.parse(name)
    if parsed.is_file:
        file = (Path.cwd() / parsed.path).resolve()
        return file, {"file": str(file)}
    imported = folder.find(parsed.digest) if parsed.digest else None
    imported = imported or fetch(parsed, folder, srun)
    return imported.path, {"reference": parsed.docker(), "digest": imported.digest}


def _text(path: Path | None, option: str) -> str:
    if path is None:
        return ""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{option} {path} cannot be read: {error}.") from error
