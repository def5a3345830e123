"""``toolkit login``: the logins that enroot takes to a registry."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.commands.display import message
from toolkit.errors import CredentialsError, UsageError

if TYPE_CHECKING:
    from toolkit.enroot.site import Site


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

    here = site.find(os.environ)
    name = credentials.registry_name(registry) if registry else None
    if check:
        raise typer.Exit(_check(here, name))
    if name is None:
        raise UsageError("toolkit login: name a registry, such as nvcr.io, or give --check.")
    text, mode = credentials.read(here.credentials)
    token_host = _token_host(here, name)
    user = credentials.user_for(name, username)
    user, password = _secret(name, user, from_stdin=password_stdin)
    wanted = [
        credentials.Entry(machine, user, password)
        for machine in credentials.machines(name, token_host)
    ]
    merged = credentials.merge(text, wanted)
    repaired = [p for p in credentials.problems(text, mode) if "needs too" not in p]
    credentials.write(here.credentials, merged)
    for problem in repaired:
        message(f"{here.credentials}: {problem} (repaired where it can be)")
    hosts = " and ".join(entry.machine for entry in wanted)
    message(f"{here.credentials}: a login as {user} for {hosts}")


def _token_host(here: Site, name: str) -> str | None:
    """The token server's host, asked of the registry; None where there is none, or no answer."""
    from toolkit.enroot import credentials, registry

    try:
        challenge = registry.Registry(name, None, http=here.on("ENROOT_ALLOW_HTTP")).challenge()
    except registry.Unreachable as error:
        if not credentials.known(name):
            message(f"{error}: if {name} has a token server on another host, log in again later")
        return None
    return challenge.token_host if challenge else None


def _secret(name: str, user: str | None, *, from_stdin: bool) -> tuple[str, str]:
    """User name and password, the latter as the credentials file has it."""
    from toolkit.enroot import credentials

    command = credentials.command_for(name)
    if from_stdin:
        secret = sys.stdin.readline().rstrip("\r\n")
        if command:
            message(
                f"{name}: this token expires, an ECR token within 12 hours; without"
                f" --password-stdin, {command} is written, which asks for a new one at each use"
            )
    elif command:
        if not shutil.which("aws"):
            message("aws is not on PATH here; it must be where enroot imports images")
        assert user is not None
        return user, command
    else:
        user, secret = _from_docker(name, user) or _asked(name, user)
    if not user or any(character.isspace() for character in user):
        raise UsageError(f"toolkit login {name}: give --username, without white space.")
    return user, credentials.literal(secret)


def _from_docker(name: str, user: str | None) -> tuple[str, str] | None:
    """The login that Docker's configuration, or a helper of it, has for the registry."""
    from toolkit.image import login as docker

    found = docker.find(name)
    stored = found.auth_config
    if stored.get("password") and user in {None, stored["username"]}:
        message(f"the login is taken from {found.source}")
        return stored["username"], stored["password"]
    if stored.get("identitytoken"):
        message(f"{found.source} has an identity token for {name}, which enroot cannot use")
    if found.problem:
        message(found.problem)
    return None


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


def _check(here: Site, name: str | None) -> int:
    """One line a finding; 77 where a login does not work."""
    from toolkit.enroot import credentials, registry

    path = here.credentials
    text, mode = credentials.read(path)
    failed = False

    def show(state: str, what: str) -> None:
        nonlocal failed
        failed = failed or state == "FAIL"
        print(f"{state:5}{what}")

    if mode is None:
        show("warn" if name is None else "FAIL", f"{path} does not exist: toolkit login REGISTRY")
    for problem in credentials.problems(text, mode):
        show("FAIL", f"{path}: {problem}: `toolkit login REGISTRY` repairs it")
    for host in [name] if name else _registries(text):
        state, said = registry.login_state(host, text, http=here.on("ENROOT_ALLOW_HTTP"))
        show(state, said)
    return CredentialsError.exit_code if failed else 0


def _registries(text: str) -> list[str]:
    """The registries that a file has logins for; hosts that are only token servers left out."""
    from toolkit.enroot import credentials

    hosts = list(dict.fromkeys(entry.machine for entry in credentials.entries(text)))
    servers = {"auth.docker.io", "authn.nvidia.com", "gitlab.com"}
    return [credentials.registry_name(host) for host in hosts if host not in servers]
