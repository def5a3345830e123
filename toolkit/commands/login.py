"""``toolkit login``: the logins that enroot takes to a registry."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from toolkit.commands.display import message
from toolkit.errors import CredentialsError, UsageError


def login(
    registry: Annotated[
        str | None,
        typer.Argument(metavar="[REGISTRY]", help="Such as nvcr.io, docker.io, HOST:PORT."),
    ] = None,
    *,
    username: Annotated[
        str | None, typer.Option("-u", "--username", help="User name at the registry.")
    ] = None,
    password_stdin: Annotated[
        bool, typer.Option("--password-stdin", help="Read the password or token from stdin.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; say whether the logins work.")
    ] = False,
) -> None:
    """Let enroot log in to a registry: write its credentials file, and repair what is in it.

    Without --password-stdin the login is taken from Docker's configuration and helpers where they
    have it, else asked for. For ECR the command that asks AWS is written, not a password.
    """
    from toolkit.enroot import credentials, site
    from toolkit.enroot import login as room

    here = site.find(os.environ)
    name = credentials.registry_name(registry) if registry else None
    if check:
        failed = False
        for state, what in room.check_logins(here, name):
            print(f"{state:5}{what}")
            failed = failed or state == "FAIL"
        raise typer.Exit(CredentialsError.exit_code if failed else 0)
    if name is None:
        raise UsageError("toolkit login: name a registry, such as nvcr.io, or give --check.")
    secret = sys.stdin.readline().rstrip("\r\n") if password_stdin else None
    room.log_in(here, name, username, secret=secret, ask=_asked, say=message)


def _asked(name: str, user: str | None) -> tuple[str, str]:
    import getpass

    if not sys.stdin.isatty():
        msg = (
            f"no login for {name} is in Docker's configuration, and there is no terminal to ask on."
            " Pipe the token in with --password-stdin, and give --username."
        )
        raise CredentialsError(msg)
    if user is None:
        print(f"User name at {name}: ", end="", file=sys.stderr, flush=True)
        user = sys.stdin.readline().strip()
    return user, getpass.getpass(f"Password or token for {user} at {name}: ", stream=sys.stderr)
