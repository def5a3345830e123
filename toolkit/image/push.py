"""Push an image, and believe only the registry's own digest."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Protocol

from toolkit.errors import CredentialsError, PushError
from toolkit.image import pin as pins

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from toolkit.image.engine import Engine
    from toolkit.image.login import Login

REFUSED = re.compile(
    r"unauthorized|denied|authentication required|no basic auth|forbidden|expired|insufficient",
    re.IGNORECASE,
)
NOT_BUILT = re.compile(r"does not exist|No such image", re.IGNORECASE)


class LayerView(Protocol):
    """Where the progress of a push is shown."""

    def layer(self, layer: str, status: str, done: int, total: int) -> None:
        """Show a layer's state; ``done`` and ``total`` in bytes, 0 where they are not known."""


def push(engine: Engine, repository: str, tag: str, login: Login, view: LayerView) -> str:
    """Push ``repository:tag``; return the digest under which the registry has it.

    Raises:
        CredentialsError: Where the registry refuses the login, or there is none.
        PushError: For any other failure, or where the registry confirmed nothing.
    """
    import docker  # noqa: PLC0415 - heavy, and only for pushes
    import requests  # noqa: PLC0415

    try:
        stream = engine.client.api.push(
            repository, tag=tag, auth_config=dict(login.auth_config), stream=True, decode=True
        )
        return follow(stream, repository, tag, login, view)
    except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
        raise registry_error("push", str(error), repository, tag, login) from error


def push_and_pin(
    engine: Engine,
    repository: str,
    tag: str,
    login: Login,
    view: LayerView,
    *,
    folder: Path,
    versions: Mapping[str, str] | None = None,
) -> pins.Pin:
    """Push, and write ``image.lock`` in ``folder`` only when the registry has confirmed.

    ``versions`` are those that the smoke test found; else what the image says of itself counts.

    Raises:
        CredentialsError: As :func:`push`.
        PushError: As :func:`push`.
    """
    digest = push(engine, repository, tag, login, view)
    attrs = engine.client.images.get(f"{repository}:{tag}").attrs
    pin = pins.Pin(
        reference=f"{repository}:{tag}",
        digest=digest,
        platform=f"{attrs['Os']}/{attrs['Architecture']}",
        versions=versions or pins.declared_versions(attrs["Config"]),
        build=pins.declared_build(attrs["Config"]),
    )
    pins.write(pin, folder)
    return pin


def follow(
    stream: Iterable[Mapping[str, Any]], repository: str, tag: str, login: Login, view: LayerView
) -> str:
    """Show the stream of a push; return the digest at its end.

    Raises:
        CredentialsError: As :func:`push`.
        PushError: As :func:`push`.
    """
    digest = ""
    for item in stream:
        if "error" in item or "errorDetail" in item:
            detail = item.get("errorDetail") or {}
            reason = str(detail.get("message") or item.get("error"))
            raise registry_error("push", reason, repository, tag, login)
        aux = item.get("aux")
        if isinstance(aux, dict) and aux.get("Digest"):
            digest = aux["Digest"]
        status = str(item.get("status", ""))
        # Podman has no aux record: it says the digest in words, as Docker does too.
        said = re.search(r"digest: (sha256:[0-9a-f]{64})", status)
        if said and not digest:
            digest = said[1]
        if item.get("id") and item["id"] != tag:
            amount = item.get("progressDetail") or {}
            view.layer(item["id"], status, amount.get("current", 0), amount.get("total", 0))
    if not digest:
        raise PushError(
            f"{repository}:{tag} is not confirmed: the engine's stream ended without the "
            "registry's digest, so the push may not have arrived; push again"
        )
    return digest


def registry_error(
    verb: str, reason: str, repository: str, tag: str, login: Login
) -> PushError | CredentialsError:
    """The error for what a registry or the engine said, with what to do about it."""
    image = f"{repository}:{tag}"
    said = f"{verb} of {image} to {login.registry} failed: {reason.strip()}"
    if REFUSED.search(reason):
        return CredentialsError(f"{said}. {login.advice()}")
    if "HTTP response to HTTPS client" in reason:
        return PushError(
            f"{said}. The registry speaks plain http, which the engine allows only where its "
            f'daemon.json asks for it: list {login.registry} in "insecure-registries" there'
        )
    if verb == "push" and NOT_BUILT.search(reason):
        return PushError(f"{said}. Build it first: toolkit build --image={image}")
    return PushError(f"{said}. Check that {login.registry} is up and reachable from the engine")
