"""``toolkit build``: an image from the Dockerfile, tested, and pushed where that is asked for."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from toolkit.commands.display import build_view
from toolkit.commands.image import EngineOption, configured_image, image_or_configured
from toolkit.commands.push import PasswordStdin, Username


class Builder(StrEnum):
    CLASSIC = "classic"
    BUILDKIT = "buildkit"


def build(
    context: Annotated[Path, typer.Argument(help="Folder that is sent to the engine.")] = Path(),
    *,
    image: Annotated[
        str | None,
        typer.Option(
            "--container-image",
            "--image",
            "--tag",
            help="Name to give it [default: container-image of toolkit.toml, else pyg:VARIANT].",
        ),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Dockerfile [default: CONTEXT/Dockerfile].")
    ] = None,
    variant: Annotated[
        str, typer.Option(help="cuda (PyPI's torch), cpu, or a CUDA such as cu130.")
    ] = "cuda",
    base: Annotated[
        str | None, typer.Option(metavar="IMAGE", help="Base image, such as NVIDIA's.")
    ] = None,
    build_arg: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="For the Dockerfile; repeatable.")
    ] = None,
    platform: Annotated[
        str | None, typer.Option(help="Such as linux/amd64 [default: the engine's own].")
    ] = None,
    network: Annotated[
        str | None, typer.Option(help="Network of the build's steps, such as host.")
    ] = None,
    builder: Annotated[Builder, typer.Option(help="The engine's builder.")] = Builder.CLASSIC,
    pull: Annotated[bool, typer.Option("--pull", help="Fetch the base image anew.")] = False,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Build every step anew.")] = False,
    push: Annotated[bool, typer.Option("--push", help="Push it when it has been tested.")] = False,
    no_smoke: Annotated[bool, typer.Option("--no-smoke", help="Do not test it.")] = False,
    username: Username = None,
    password_stdin: PasswordStdin = False,
    engine: EngineOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the docker commands; build nothing.")
    ] = False,
) -> None:
    """Build an image, test it as a cluster would start it, and push it."""
    import json
    import shlex

    from toolkit.commands import push as pushing
    from toolkit.commands import smoke as smoking
    from toolkit.image import build as room
    from toolkit.image import engine as engines
    from toolkit.image import reference
    from toolkit.image.context import human, scan

    # A name that nobody chose is good enough for this machine, not for a registry.
    name = image_or_configured(image) if push else image or configured_image() or f"pyg:{variant}"
    spec = room.make_spec(
        context,
        name,
        variant=variant,
        file=file,
        base=base,
        build_args=build_arg or [],
        platform=platform,
        network=network,
        pull=pull,
        no_cache=no_cache,
    )
    sent = scan(spec.context, spec.dockerfile)
    entries = ", ".join(f"{entry} ({human(size)})" for entry, size in sent.largest)
    _say(f"context: {human(sent.size)} in {sent.files} files: {entries}")
    for warning in (*sent.warnings, *filter(None, [spec.warning])):
        _say(f"warning: {warning}")
    if dry_run:
        argv = spec.argv()
        typer.echo(shlex.join([*argv[:2], f"--tag={spec.tag}", *argv[2:]]))
        if not no_smoke:
            typer.echo(shlex.join(["toolkit", "smoke", spec.tag]))
        if push:
            typer.echo(shlex.join(["docker", "push", spec.tag]))
        return
    registry = str(reference.parse(name).registry)
    login = pushing.login_for(registry, username, password_stdin=password_stdin) if push else None
    result: dict[str, Any] = {"image": spec.tag}
    with engines.connect(engine) as found:
        _say(f"engine: {found}")
        with build_view() as view:
            built = room.build(found, spec, view, with_buildkit=builder is Builder.BUILDKIT)
        _say(f"built {spec.tag} ({built.image_id[:19]}, {built.platform}, {human(built.size)})")
        note = room.platform_note(spec.platform, built.platform)
        if note:
            _say(f"warning: {note}")
        result |= vars(built)
        if not no_smoke:
            report = smoking.show(found, spec.tag, gpus=False, to_stderr=True)
            smoking.require(report)
            result["versions"] = report.versions
        if login:
            repository, _, tag = spec.tag.rpartition(":")
            pin = pushing.push_and_pin(found, repository, tag, login, result.get("versions"))
            result["digest"] = pin.digest
            result["pushed"] = f"{repository}@{pin.digest}"
    typer.echo(json.dumps(result, indent=2) if as_json else result.get("pushed", spec.tag))


def _say(text: str) -> None:
    typer.echo(text, err=True)
