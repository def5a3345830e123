"""Logging enroot in to a registry: what its credentials file gets, and whether that works."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from toolkit.enroot import credentials, registry
from toolkit.errors import UsageError
from toolkit.image import login as docker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from toolkit.enroot.site import Site

    Say = Callable[[str], None]
    Ask = Callable[[str, str | None], tuple[str, str]]

#: They only give tokens: a line for one of them is no login to a registry.
TOKEN_SERVERS = {"auth.docker.io", "authn.nvidia.com", "gitlab.com"}


def log_in(
    site: Site, name: str, user: str | None, *, secret: str | None, ask: Ask, say: Say
) -> None:
    """Write a login into enroot's credentials file, and repair what is in it.

    Args:
        site: enroot on this machine.
        name: the registry, from :func:`toolkit.enroot.credentials.registry_name`.
        user: the user name that was given.
        secret: the password or token that was given; without it Docker's configuration is looked
            into, and ECR's own command written.
        ask: asks the user, for a registry and a user name, where nobody else knows a login.
        say: gets what the user should know.

    Raises:
        UsageError: Where no user name is known.
        CredentialsError: Where the file cannot be read or written, or cannot hold the secret.
    """
    text, mode = credentials.read(site.credentials)
    token_host = _token_host(site, name, say)
    user = credentials.user_for(name, user)
    user, password = _password(name, user, secret, ask, say)
    wanted = [
        credentials.Entry(machine, user, password)
        for machine in credentials.machines(name, token_host)
    ]
    merged = credentials.merge(text, wanted)
    repaired = [p for p in credentials.problems(text, mode) if "needs too" not in p]
    credentials.write(site.credentials, merged)
    for problem in repaired:
        say(f"{site.credentials}: {problem} (repaired where it can be)")
    hosts = " and ".join(entry.machine for entry in wanted)
    say(f"{site.credentials}: a login as {user} for {hosts}")


def _token_host(site: Site, name: str, say: Say) -> str | None:
    """The token server's host, asked of the registry; None where there is none, or no answer."""
    try:
        challenge = registry.Registry(name, None, http=site.on("ENROOT_ALLOW_HTTP")).challenge()
    except registry.Unreachable as error:
        if not credentials.known(name):
            say(f"{error}: if {name} has a token server on another host, log in again later")
        return None
    return challenge.token_host if challenge else None


def _password(
    name: str, user: str | None, secret: str | None, ask: Ask, say: Say
) -> tuple[str, str]:
    """User name and password, the latter as the credentials file has it."""
    command = credentials.command_for(name)
    if secret is not None:
        if command:
            say(
                f"{name}: this token expires, an ECR token within 12 hours; without"
                f" --password-stdin, {command} is written, which asks for a new one at each use"
            )
    elif command:
        if not shutil.which("aws"):
            say("aws is not on PATH here; it must be where enroot imports images")
        assert user is not None
        return user, command
    else:
        user, secret = _from_docker(name, user, say) or ask(name, user)
    if not user or any(character.isspace() for character in user):
        raise UsageError(f"toolkit login {name}: give --username, without white space.")
    return user, credentials.literal(secret)


def _from_docker(name: str, user: str | None, say: Say) -> tuple[str, str] | None:
    """The login that Docker's configuration, or a helper of it, has for the registry."""
    found = docker.find(name)
    stored = found.auth_config
    if stored.get("password") and user in {None, stored["username"]}:
        say(f"the login is taken from {found.source}")
        return stored["username"], stored["password"]
    if stored.get("identitytoken"):
        say(f"{found.source} has an identity token for {name}, which enroot cannot use")
    if found.problem:
        say(found.problem)
    return None


def check_logins(site: Site, name: str | None) -> Iterator[tuple[str, str]]:
    """``ok``, ``warn`` or ``FAIL`` for each finding, and what it is; of one registry, or of all."""
    path = site.credentials
    text, mode = credentials.read(path)
    if mode is None:
        yield ("warn" if name is None else "FAIL", f"{path} does not exist: toolkit login REGISTRY")
    for problem in credentials.problems(text, mode):
        yield "FAIL", f"{path}: {problem}: `toolkit login REGISTRY` repairs it"
    for host in [name] if name else _registries(text):
        yield registry.login_state(host, text, http=site.on("ENROOT_ALLOW_HTTP"))


def _registries(text: str) -> list[str]:
    hosts = dict.fromkeys(entry.machine for entry in credentials.entries(text))
    return [credentials.registry_name(host) for host in hosts if host not in TOKEN_SERVERS]
