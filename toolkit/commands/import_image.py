"""``toolkit import``: an image as a squashfs file that all nodes start at once."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit import config
from toolkit.commands.display import message
from toolkit.commands.options import AsJson, Cluster, OnNode, wants_node
from toolkit.errors import UnavailableError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from toolkit.config import Setting
    from toolkit.enroot.images import Images, Imported
    from toolkit.image.reference import Reference

DAY_S = 24 * 3600


def import_image(
    image: Annotated[
        str | None,
        typer.Argument(metavar="[IMAGE]", help="Image [default: container-image of toolkit.toml]."),
    ] = None,
    *,
    images: Annotated[
        str | None,
        typer.Option(help="Folder that all nodes see [default: TOOLKIT_IMAGES, else images]."),
    ] = None,
    on: OnNode = "local",
    partition: Annotated[
        str | None, typer.Option("-p", "--partition", help="Partition, with --on slurm.")
    ] = None,
    account: Annotated[
        str | None, typer.Option("-A", "--account", help="Account, with --on slurm.")
    ] = None,
    lock_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds to wait while another one imports the image.")
    ] = 3600.0,
    clean: Annotated[
        bool, typer.Option("--clean", help="Remove images that no run has used lately, instead.")
    ] = False,
    unused: Annotated[
        float, typer.Option(min=0, help="With --clean: days without use that an image may stay.")
    ] = 30.0,
    cluster: Cluster = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done; do nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Import an image once, as FOLDER/sha256-DIGEST.sqsh, which run and submit then start.

    An image that is there costs one request to the registry. The file is compressed with zstd at
    level 3 (ENROOT_SQUASH_OPTIONS in the environment wins).
    """
    from toolkit.enroot import images as stored
    from toolkit.slurm import helper

    cwd = Path.cwd()
    given = {"images": images, "partition": partition, "account": account}
    settings = config.settings(given, os.environ, cwd, cluster)
    folder = stored.Images(stored.folder(config.value(settings, "images"), cwd))
    if clean:
        if image:
            raise UsageError("--clean goes through the whole folder: leave IMAGE out.")
        _clean(folder, unused * DAY_S, dry_run=dry_run)
        return
    named = _named(image, settings, cwd)
    srun = helper.srun_argv(settings, "toolkit-import") if wants_node(on) else ()
    if dry_run:
        _show(named, folder, srun)
        return
    done = fetch(named, folder, srun, lock_timeout)
    record = {**done.record, "path": str(done.path)}
    print(json.dumps(record) if as_json else done.path)


def _named(image: str | None, settings: Mapping[str, Setting], cwd: Path) -> Reference:
    """The image that was named, else the project's, which ``image.lock`` may pin."""
    from toolkit.image import pin, reference

    if image is not None:
        return reference.parse(image)
    configured = config.value(settings, "container_image")
    if configured is None:
        raise UsageError("toolkit import: name an image, or give --clean.")
    return pin.pinned(reference.parse(configured), cwd)[0]


def fetch(
    image: Reference, folder: Images, srun: tuple[str, ...], lock_timeout: float = 3600.0
) -> Imported:
    """Import an image, if it is not there, and say what is done."""
    from toolkit.enroot import importing, site
    from toolkit.slurm import helper, probe

    if srun:
        why = probe.unreachable(os.environ)
        if why:
            raise UnavailableError(f"--on slurm: {why}. Leave it out to use this machine.")
    environ = helper.helper_environment(os.environ)
    return importing.fetch(
        image, folder, site.find(os.environ), environ,
        say=message, srun=srun, lock_timeout_s=lock_timeout,
    )  # fmt: skip


def _show(image: Reference, folder: Images, srun: tuple[str, ...]) -> None:
    """What would be executed; the digest is not asked for."""
    from toolkit.enroot.images import SQUASH_OPTIONS

    digest = image.digest or "sha256:DIGEST"
    command = [*srun, "enroot", "import", "-o", str(folder.file(digest)), image.enroot()]
    print(f"export ENROOT_SQUASH_OPTIONS={shlex.quote(SQUASH_OPTIONS)}")
    print(shlex.join(command))


def _clean(folder: Images, age_s: float, *, dry_run: bool) -> None:
    removed = 0
    for found in folder.clean(age_s, dry_run=dry_run):
        if found.why_it_stays:
            message(f"{found.path.name} stays: {found.why_it_stays}")
            continue
        removed += found.size
        size, days = f"{found.size / 1e6:.0f} MB", f"{found.age_s / DAY_S:.0f} days"
        what = f"{found.path.name} ({size}, not used for {days})"
        print(f"{'would remove' if dry_run else 'removed'} {what}")
    verb = "would be freed" if dry_run else "freed"
    message(f"{removed / 1e6:.0f} MB {verb} in {folder.path}")
