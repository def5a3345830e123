"""``toolkit image``: what is known about an image without asking a registry or an engine."""

from __future__ import annotations

from typing import Annotated

import typer

EngineOption = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="The engine's address [default: DOCKER_HOST, docker's context, sockets].",
    ),
]


def configured_image() -> str | None:
    """``container-image`` of toolkit.toml or its variable, as ``toolkit run`` takes it."""
    import os
    from pathlib import Path

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
