"""``toolkit export``: an image of the local engine as a squashfs file, without a registry."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from toolkit.commands.display import message
from toolkit.commands.image import EngineOption, image_or_configured


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
