"""``toolkit image``: what is known about an image without asking a registry or an engine."""

from __future__ import annotations

from typing import Annotated

import typer


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
