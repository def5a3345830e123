"""``toolkit smoke``: whether an image will start and train on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.commands.image import EngineOption, image_or_configured

if TYPE_CHECKING:
    from toolkit.image.engine import Engine
    from toolkit.image.smoke import Report


def smoke(
    image: Annotated[
        str | None,
        typer.Argument(metavar="[IMAGE]", help="Image [default: container-image of toolkit.toml]."),
    ] = None,
    *,
    gpus: Annotated[
        bool, typer.Option("--gpus", help="Check CUDA, NCCL and the GPUs too.")
    ] = False,
    engine: EngineOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    junit: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a JUnit report for a CI system.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be tested; start nothing.")
    ] = False,
) -> None:
    """Test an image in containers like a cluster's: no root, a read-only root, no network."""
    from toolkit.image import engine as engines
    from toolkit.image import smoke as room

    name = image_or_configured(image)
    if dry_run:
        typer.echo(f"image {name}: {', '.join(room.names(gpus=gpus))}")
        return
    with engines.connect(engine) as found:
        typer.echo(f"engine: {found}", err=True)
        report = show(found, name, gpus=gpus, to_stderr=as_json)
    if junit:
        junit.write_text(report.junit(), encoding="utf-8")
    if as_json:
        import json

        typer.echo(json.dumps(report.as_dict(), indent=2))
    require(report)


def show(engine: Engine, image: str, *, gpus: bool, to_stderr: bool) -> Report:
    """Run the smoke test, a line for each check as it ends."""
    from toolkit.image import smoke as room

    for item in room.smoke(engine, image, gpus=gpus):
        if isinstance(item, room.Report):
            return item
        typer.echo(str(item), err=to_stderr)
    raise AssertionError


def require(report: Report) -> None:
    """Raise SmokeError where a check failed."""
    from toolkit.errors import SmokeError

    if report.failed:
        raise SmokeError(
            f"image {report.image}: {len(report.failed)} of {len(report.results)} checks failed: "
            f"{', '.join(report.failed)}"
        )
