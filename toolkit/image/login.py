"""The login for a registry: given with the command, or from Docker's configuration and helpers."""

from __future__ import annotations

import base64
import json
import os
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from toolkit.common.capture import capture
from toolkit.image.engine import docker_config_folder
from toolkit.image.reference import DOCKER_HUB, HUB_NAMES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

HUB_KEY = "https://index.docker.io/v1/"  # what Docker and its helpers call Docker Hub
IDENTITY_TOKEN = "<token>"  # noqa: S105 - the user name that stands for "the secret is a token"
GIVEN = "the command line"
HELPER_SECONDS = 30


@dataclass(frozen=True)
class Login:
    registry: str
    source: str = ""
    """In words for a message; empty where there is no login."""
    auth_config: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What goes to the engine with a push; empty for none."""
    problem: str = ""
    """Why a login that the configuration promises could not be had."""

    def advice(self) -> str:
        """What to do when the registry refuses it."""
        again = f"`docker login {self.registry}`, or --username with --password-stdin"
        if self.problem:
            return f"{self.problem}. Mend that, or use {again}"
        if not self.source:
            return f"There is no login for {self.registry}: {again}"
        if self.source == GIVEN:
            return f"{self.registry} refused the user name and password that were given"
        return (
            f"The login for {self.registry} is from {self.source}: it may have expired, or may "
            f"not allow a push there. Log in again: {again}"
        )


def find(
    registry: str, given: tuple[str, str] | None = None, environ: Mapping[str, str] = os.environ
) -> Login:
    """The login for ``registry`` (host and port, or ``docker.io``); a given one wins.

    A helper that is missing or fails is no error yet: the registry may need no login.
    """
    if given:
        return Login(registry, GIVEN, _password(*given))
    try:
        return _look_up(registry, docker_config_folder(environ) / "config.json", environ)
    except _Problem as problem:
        return Login(registry, problem=str(problem))


class _Problem(Exception):  # noqa: N818 - ends up in a Login, not before a user
    """Why a login could not be had."""


def _look_up(registry: str, file: Path, environ: Mapping[str, str]) -> Login:
    try:
        config = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        helper = _entry(config.get("credHelpers", {}), registry) or config.get("credsStore")
        entry = _entry(config.get("auths", {}), registry)
    except (OSError, ValueError, AttributeError) as error:
        raise _Problem(f"{file} cannot be read: {error}") from error
    if helper:
        program = f"docker-credential-{helper}"
        found = _ask(program, HUB_KEY if registry == DOCKER_HUB else registry, file, environ)
        if found:
            return Login(registry, program, found)
    if not entry:
        return Login(registry)
    try:
        return Login(registry, str(file), _stored(entry))
    except (ValueError, KeyError) as error:
        raise _Problem(f"{file}: the entry for {registry} is damaged") from error


def _entry(table: Mapping[str, Any], registry: str) -> Any:
    """What a table of the configuration has for a registry, whatever the form of its keys."""
    return next((value for key, value in table.items() if _host(key) == registry), None)


def _host(key: str) -> str:
    """Older Dockers wrote ``https://HOST/v1/`` where today's write ``HOST``."""
    host = (key.partition("://")[2] or key).partition("/")[0]
    return DOCKER_HUB if host in HUB_NAMES else host


def _password(user: str, password: str) -> dict[str, str]:
    return {"username": user, "password": password}


def _stored(entry: Mapping[str, str]) -> dict[str, str]:
    if entry.get("identitytoken"):
        return {"identitytoken": entry["identitytoken"]}
    user, colon, password = base64.b64decode(entry["auth"], validate=True).decode().partition(":")
    if not colon:
        raise ValueError("no colon")
    return _password(user, password)


def _ask(program: str, server: str, file: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """What a credential helper answers; empty where it knows nothing of the registry."""
    answer = capture([program, "get"], HELPER_SECONDS, environ, text=server)
    if answer.code is None:
        if shutil.which(program, path=environ.get("PATH")) is None:
            raise _Problem(f"{file} names {program}, which is not installed")
        raise _Problem(f"{program}, which {file} names, does not answer")
    if not answer.ok:
        said = answer.stdout.strip() or answer.stderr.strip()
        if "not found" in said:
            return {}
        raise _Problem(f"{program}, which {file} names, failed: {said[:200]}")
    try:
        found = json.loads(answer.stdout)
        user, secret = found["Username"], found["Secret"]
    except (ValueError, KeyError, TypeError) as error:
        raise _Problem(f"{program}, which {file} names, gave no login") from error
    if not secret:
        return {}
    return {"identitytoken": secret} if user == IDENTITY_TOKEN else _password(user, secret)
