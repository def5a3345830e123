"""``toolkit push``: an image to a registry, and its digest into ``image.lock``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.commands.display import push_view
from toolkit.commands.image import EngineOption, image_or_configured

if TYPE_CHECKING:
    from collections.abc import Mapping

    from toolkit.image.engine import Engine
    from toolkit.image.login import Login
    from toolkit.image.pin import Pin

Username = Annotated[
    str | None, typer.Option(help="User at the registry; its password is read from stdin.")
]
PasswordStdin = Annotated[
    bool, typer.Option("--password-stdin", help="Read the password of --username from stdin.")
]


def push(
    image: Annotated[
        str | None,
        typer.Argument(metavar="[IMAGE]", help="Image [default: container-image of toolkit.toml]."),
    ] = None,
    *,
    username: Username = None,
    password_stdin: PasswordStdin = False,
    engine: EngineOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be pushed; push nothing.")
    ] = False,
) -> None:
    """Push an image, print the registry's digest and record it in image.lock."""
    import json

    from toolkit.image import engine as engines
    from toolkit.image import reference

    parsed = reference.parse(image_or_configured(image))
    repository, tag = parsed.push_target()
    if dry_run:
        typer.echo(f"docker push {repository}:{tag}")
        return
    login = login_for(str(parsed.registry), username, password_stdin=password_stdin)
    with engines.connect(engine) as found:
        typer.echo(f"engine: {found}", err=True)
        pin = push_and_pin(found, repository, tag, login)
    if as_json:
        typer.echo(json.dumps(vars(pin), indent=2))
    else:
        typer.echo(f"{repository}@{pin.digest}")


def login_for(registry: str, username: str | None, *, password_stdin: bool) -> Login:
    """The login given with the command, else the stored one.

    Raises:
        UsageError: Where only one of user name and password is given.
    """
    from toolkit.errors import UsageError
    from toolkit.image import login

    if bool(username) != password_stdin:
        raise UsageError("--username and --password-stdin go together: the password comes on stdin")
    given = None
    if username:
        password = sys.stdin.readline().rstrip("\r\n")
        if not password:
            raise UsageError("--password-stdin: stdin is empty")
        given = (username, password)
    return login.find(registry, given)


def push_and_pin(
    engine: Engine,
    repository: str,
    tag: str,
    login: Login,
    versions: Mapping[str, str] | None = None,
) -> Pin:
    """Push, show it, and say what was recorded."""
    from toolkit.image import pin
    from toolkit.image.push import push_and_pin as room

    if login.problem:
        typer.echo(f"warning: {login.problem}", err=True)
    with push_view() as view:
        found = room(engine, repository, tag, login, view, folder=Path.cwd(), versions=versions)
    typer.echo(f"recorded in {pin.FILE_NAME}", err=True)
    return found
