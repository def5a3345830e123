"""The container engine: which one is meant, whether it answers, and why not."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from toolkit.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import docker

PING_SECONDS = 10
# How long an engine may say nothing while it works: pip is silent while it fetches a large wheel.
SILENCE_SECONDS = 1800


@dataclass(frozen=True)
class Candidate:
    """Where an engine may be, and who said so."""

    url: str
    source: str
    chosen: bool
    """Named by the user: where it does not answer, no other engine is taken instead."""


@dataclass(frozen=True)
class Engine:
    """An engine that answered."""

    client: docker.DockerClient
    url: str
    source: str
    name: str
    """Such as ``Docker Engine 26.1.5`` or ``Podman Engine 4.3.1``."""
    architecture: str
    """Of the engine's machine, in Go's words: ``amd64``, ``arm64``."""

    @property
    def is_podman(self) -> bool:
        """Whether this is Podman, whose socket speaks Docker's language with an accent."""
        return self.name.startswith("Podman")

    def __str__(self) -> str:
        """One line for a log: what it is, where, and why this one."""
        note = "; only Docker's own engine is tested" if self.is_podman else ""
        return f"{self.name} at {self.url} ({self.source}){note}"


def docker_config_folder(environ: Mapping[str, str]) -> Path:
    """Where the docker command line keeps its configuration, contexts and credentials."""
    return Path(environ.get("DOCKER_CONFIG") or Path.home() / ".docker")


def candidates(explicit: str | None, environ: Mapping[str, str]) -> list[Candidate]:
    """Where to look, in order; a place that the user named comes alone.

    Raises:
        UnavailableError: Where the docker command line's context is not there.
    """
    if explicit:
        return [Candidate(explicit, "--engine", chosen=True)]
    if environ.get("DOCKER_HOST"):
        return [Candidate(environ["DOCKER_HOST"], "DOCKER_HOST", chosen=True)]
    context = _context(environ)
    if context:
        return [context]
    runtime = environ.get("XDG_RUNTIME_DIR")
    sockets = [("/var/run/docker.sock", "Docker's socket")]
    if runtime:
        sockets.append((f"{runtime}/docker.sock", "rootless Docker's socket"))
        sockets.append((f"{runtime}/podman/podman.sock", "Podman's socket"))
    sockets.append(("/run/podman/podman.sock", "Podman's socket"))
    return [Candidate(f"unix://{path}", source, chosen=False) for path, source in sockets]


def _context(environ: Mapping[str, str]) -> Candidate | None:
    """The docker command line's current context, unless it is the default one."""
    folder = docker_config_folder(environ)
    name = environ.get("DOCKER_CONTEXT")
    source = f"DOCKER_CONTEXT={name}"
    if not name:
        name = _read(folder / "config.json").get("currentContext")
        source = f"docker context {name}"
    if not name or name == "default":
        return None
    meta = folder / "contexts" / "meta" / hashlib.sha256(name.encode()).hexdigest() / "meta.json"
    try:
        url = str(_read(meta)["Endpoints"]["docker"]["Host"])
    except (KeyError, TypeError) as error:
        raise UnavailableError(
            f"{source}: there is no such context in {folder}. "
            "`docker context ls` lists them, `docker context use NAME` chooses one"
        ) from error
    return Candidate(url, source, chosen=True)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@contextmanager
def connect(
    explicit: str | None = None, environ: Mapping[str, str] = os.environ
) -> Iterator[Engine]:
    """Find the engine, ping it, and close the connection at the end.

    Raises:
        UnavailableError: Where none answers; the message says for each place why.
    """
    failures = []
    for candidate in candidates(explicit, environ):
        try:
            engine = _ping(candidate, environ)
        except Exception as error:  # noqa: BLE001 - docker-py wraps whatever its transports raise
            failures.append((candidate, explain(candidate, error)))
            continue
        try:
            yield engine
        finally:
            engine.client.close()
        return
    raise UnavailableError(no_engine(failures))


def _ping(candidate: Candidate, environ: Mapping[str, str]) -> Engine:
    import docker  # noqa: PLC0415 - costs 200 ms, which a command without an engine need not pay
    from docker.utils import kwargs_from_env  # noqa: PLC0415

    _knock(candidate.url)
    client = docker.DockerClient(
        version="auto",
        timeout=PING_SECONDS,
        use_ssh_client=True,
        **kwargs_from_env(environment={**environ, "DOCKER_HOST": candidate.url}),
    )
    try:
        client.ping()
        version = client.version()
    except BaseException:
        client.close()
        raise
    client.api.timeout = SILENCE_SECONDS
    component = (version.get("Components") or [{"Name": "Engine"}])[0]["Name"]
    kind = component if component.startswith("Podman") else f"Docker {component}"
    return Engine(
        client=client,
        url=candidate.url,
        source=candidate.source,
        name=f"{kind} {version['Version']}",
        architecture=version["Arch"],
    )


def _knock(url: str) -> None:
    """Connect and hang up: the plain error is in docker-py's under several wrappings.

    Raises:
        OSError: Where nothing can be connected to.
    """
    parts = urlsplit(url)
    if parts.scheme == "unix":
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(PING_SECONDS)
            connection.connect(parts.path)
    elif parts.scheme == "tcp" and parts.hostname:
        address = (parts.hostname, parts.port or 2375)
        socket.create_connection(address, PING_SECONDS).close()


def explain(candidate: Candidate, error: BaseException) -> str:
    """Why an engine does not answer, and what to do about it."""
    path = candidate.url.removeprefix("unix://")
    match error:
        case FileNotFoundError():
            return f"{path} is not there: no engine runs, or it is not installed"
        case PermissionError():
            return (
                f"{path} is there, but you may not use it: `sudo usermod -aG docker $USER`, "
                "then log in again"
            )
        case ConnectionRefusedError():
            return f"nothing answers at {candidate.url}: the engine was stopped; start it again"
        case TimeoutError():
            return f"{candidate.url} did not answer within {PING_SECONDS} s"
    first_line = str(error).partition("\n")[0]
    return f"{candidate.url} could not be used: {first_line}"


def no_engine(failures: list[tuple[Candidate, str]]) -> str:
    """The whole message: one place that was chosen, or each place that was tried."""
    if len(failures) == 1:
        candidate, why = failures[0]
        return f"no container engine ({candidate.source}): {why}"
    # A socket that is there says more than those that are not.
    telling = [why for _, why in failures if "is not there" not in why]
    if telling:
        return f"no container engine: {'; '.join(telling)}"
    places = ", ".join(candidate.url.removeprefix("unix://") for candidate, _ in failures)
    return (
        f"no container engine: there is no socket at {places}. Install Docker and start it, or "
        "name an engine with --engine, DOCKER_HOST or `docker context use`"
    )
