"""``toolkit image`` and ``export``: an image's names, and an image of the engine's as a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from toolkit.commands.display import message

EngineOption = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="The engine's address [default: DOCKER_HOST, docker's context, sockets].",
    ),
]


def configured_image() -> str | None:
    """``container-image`` of toolkit.toml or its variable, as ``toolkit run`` takes it."""
    from toolkit import config

    setting = config.settings({}, os.environ, Path.cwd()).get("container_image")
    return str(setting.value) if setting else None


def image_or_configured(image: str | None) -> str:
    """The image that was named, else the configured one.

    Raises:
        UsageError: Where there is none.
    """
    from toolkit.errors import UsageError

    found = image or configured_image()
    if not found:
        raise UsageError(
            "no image: name one, or set container-image in [job] of toolkit.toml "
            "or TOOLKIT_CONTAINER_IMAGE"
        )
    return found


def ref(
    reference: Annotated[
        str, typer.Argument(metavar="REF", help="HOST/PATH:TAG, HOST#PATH:TAG or FILE.sqsh")
    ],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show how Docker, enroot and pyxis spell an image reference."""
    import json

    from toolkit.image.reference import parse

    parsed = parse(reference)
    spellings = {
        "docker": None if parsed.is_file else parsed.docker(),
        "enroot": parsed.enroot(),
        "pyxis": parsed.pyxis(),
        "sbatch": parsed.sbatch(),
    }
    if as_json:
        parts = {
            "registry": parsed.registry,
            "path": parsed.path,
            "tag": parsed.tag,
            "digest": parsed.digest,
            "user": parsed.user,
        }
        typer.echo(json.dumps(parts | spellings, indent=2))
        return
    for tool, spelling in spellings.items():
        typer.echo(f"{tool:8}{spelling or '(a squashfs file: Docker cannot use it)'}")


def export(
    image: Annotated[
        str | None,
        typer.Argument(metavar="[IMAGE]", help="Image [default: container-image of toolkit.toml]."),
    ] = None,
    *,
    output: Annotated[Path, typer.Option("-o", "--output", help="The .sqsh file to write.")],
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    engine: EngineOption = None,
) -> None:
    """Write an image as a .sqsh file, which a cluster starts like one imported from a registry."""
    from toolkit.enroot import export as exporting
    from toolkit.image import engine as engines
    from toolkit.image import reference

    name = reference.parse(image_or_configured(image)).docker()
    target = Path.cwd() / output
    with engines.connect(engine, os.environ) as found:
        message(f"exporting {name} from {found}")
        size = exporting.export(found, name, target, force=force)
    message(f"{target} has {size / 1e6:.0f} MB")
    print(target)
