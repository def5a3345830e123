"""A registry's own word about an image: its digest, platform and size; and whether a login is good.

Logins are looked up as enroot does, so that what works here works there.
"""

from __future__ import annotations

import base64
import http.client
import json
import platform
import re
import ssl
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from toolkit.common.capture import capture
from toolkit.enroot import credentials
from toolkit.errors import CredentialsError, ImportImageError
from toolkit.image.reference import ARCHITECTURES, DOCKER_HUB, HUB_NAMES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from email.message import Message

    from toolkit.image.reference import Reference

TIMEOUT_S = 15
EVALUATE_S = 30
MAX_MANIFEST = 16 << 20
LISTS = (
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.index.v1+json",
)
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
MANIFESTS = ("application/vnd.docker.distribution.manifest.v2+json", OCI_MANIFEST)


@dataclass(frozen=True)
class Image:
    """An image as a registry has it, for one architecture."""

    digest: str
    """Of the manifest for this architecture; it names the image for good."""
    index: str | None
    """Of the list that the manifest was found in, for images of several architectures."""
    media_type: str
    config: str
    """The digest of the image's configuration."""
    layers: Mapping[str, int] = field(default_factory=dict)
    """Compressed sizes in bytes, by digest."""

    @property
    def size(self) -> int:
        return sum(self.layers.values())


class Unreachable(Exception):  # noqa: N818 - always turned into a message
    """The registry does not answer as one."""


class Refused(Exception):  # noqa: N818 - always turned into a message
    """The registry or its token server wants (another) login."""


@dataclass(frozen=True)
class Challenge:
    """How a registry wants to be asked."""

    scheme: str  #: ``bearer`` or ``basic``
    parameters: Mapping[str, str] = field(default_factory=dict)

    @property
    def token_host(self) -> str | None:
        """Host and port of the token server."""
        realm = urllib.parse.urlsplit(self.parameters.get("realm", ""))
        return realm.netloc or None if self.scheme == "bearer" else None


def parse_challenge(header: str) -> Challenge:
    scheme, _, rest = header.strip().partition(" ")
    pairs = re.findall(r'(\w+)=(?:"([^"]*)"|([^\s,]+))', rest)
    return Challenge(scheme.lower(), {name.lower(): quoted or bare for name, quoted, bare in pairs})


class Registry:
    """One registry, with the login that enroot would take for it."""

    def __init__(self, registry: str, login: credentials.Entry | None, *, http: bool) -> None:
        """Nothing is asked yet.

        Args:
            registry: host and port, or ``docker.io``.
            login: the login, its password as the credentials file has it.
            http: whether enroot is configured to speak plain http.
        """
        host = HUB_NAMES[-1] if registry == DOCKER_HUB else registry
        self.name = registry
        self._base = f"{'http' if http else 'https'}://{host}"
        self._http = http
        self._login = login
        self._header: str | None = None

    def challenge(self) -> Challenge | None:
        """How the registry wants to be asked; None where it is open.

        Raises:
            Unreachable: Where no registry answers.
        """
        status, headers, _ = self._ask(f"{self._base}/v2/", {})
        if status == 200:
            return None
        header = headers.get("WWW-Authenticate")
        if status == 401 and header:
            return parse_challenge(header)
        raise Unreachable(f"{self._base}/v2/ answered {status}, which is no registry's answer")

    def check_login(self) -> None:
        """Try the login.

        Raises:
            Unreachable: Where no registry, or no token server, answers.
            Refused: Where the login is not good.
        """
        challenge = self.challenge()
        if challenge is None:
            return
        if challenge.scheme == "bearer":
            self._token(challenge, None)
            return
        self._header = self._basic()
        status, _, _ = self._ask(f"{self._base}/v2/", {})
        if status in {401, 403}:
            raise Refused("it refuses the user name or password, which is wrong or has expired")

    def image(self, reference: Reference, architecture: str | None = None) -> Image:
        """What the registry has under ``reference``.

        Raises:
            CredentialsError: Where it refuses the login, or wants one.
            ImportImageError: For any other failure.
        """
        name = reference.docker()
        try:
            return self._image(reference, architecture or machine_architecture())
        except Refused as error:
            raise CredentialsError(
                f"{self.name} does not give {name}: {error}. `toolkit login {self.name}` writes"
                f" the login, `toolkit login --check {self.name}` tries it."
            ) from error
        except Unreachable as error:
            raise ImportImageError(f"{name} cannot be looked up: {error}.") from error

    def config(self, reference: Reference, image: Image) -> dict[str, Any]:
        """The image's configuration, as in the OCI image specification."""
        url = f"{self._base}/v2/{reference.path}/blobs/{image.config}"
        try:
            status, _, body = self._ask(url, {})
            if status == 200:
                found: dict[str, Any] = json.loads(body)
                return found
        except (Unreachable, ValueError):
            pass
        raise ImportImageError(f"{self.name} does not give the configuration of {image.digest}.")

    def _image(self, reference: Reference, architecture: str) -> Image:
        version = reference.digest or reference.tag or "latest"
        body, headers = self._manifest(reference, version)
        digest = headers.get("Docker-Content-Digest") or version
        manifest = self._json(body)
        index = None
        if "manifests" in manifest:
            index = digest
            digest = _pick(manifest, architecture, reference)
            body, _ = self._manifest(reference, digest)
            manifest = self._json(body)
        try:
            layers = {layer["digest"]: int(layer["size"]) for layer in manifest["layers"]}
            config = str(manifest["config"]["digest"])
        except (KeyError, TypeError, ValueError) as error:
            raise ImportImageError(
                f"{reference.docker()} is no image that enroot can import: its manifest has the"
                f" type {manifest.get('mediaType') or manifest.get('schemaVersion')!r}."
            ) from error
        if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
            raise ImportImageError(f"{self.name} gave no digest for {reference.docker()}.")
        return Image(digest, index, str(manifest.get("mediaType") or OCI_MANIFEST), config, layers)

    def _manifest(self, reference: Reference, version: str) -> tuple[bytes, Message]:
        url = f"{self._base}/v2/{reference.path}/manifests/{version}"
        accept = {"Accept": ", ".join((*LISTS, *MANIFESTS))}
        status, headers, body = self._ask(url, accept)
        if status == 401:
            challenge = parse_challenge(headers.get("WWW-Authenticate") or "basic")
            if challenge.scheme == "bearer":
                self._token(challenge, f"repository:{reference.path}:pull")
            else:
                self._header = self._basic()
            status, headers, body = self._ask(url, accept)
        if status in {401, 403}:
            raise Refused(
                "the login does not allow it" if self._login else "it wants a login, and has none"
            )
        if status == 404:
            raise ImportImageError(
                f"{reference.docker()} is not in the registry {self.name}: check the name and tag."
                " (Some registries answer so where a login is missing.)"
            )
        if status != 200:
            raise Unreachable(f"{self.name} answered {status} {http.client.responses.get(status)}")
        return body, headers

    def _token(self, challenge: Challenge, scope: str | None) -> None:
        realm = challenge.parameters.get("realm", "")
        if not realm.startswith("https://") and not (self._http and realm.startswith("http://")):
            raise Unreachable(f"{self.name} names {realm!r} as its token server, which is no URL")
        query = {k: v for k, v in challenge.parameters.items() if k in {"service", "scope"}}
        if scope:
            query.setdefault("scope", scope)
        self._header = self._basic() if self._login else None
        joint = "&" if urllib.parse.urlsplit(realm).query else "?"
        status, _, body = self._ask(f"{realm}{joint}{urllib.parse.urlencode(query)}", {})
        self._header = None
        if status in {400, 401, 403}:
            said = (
                "refuses the user name or password, which is wrong or has expired"
                if self._login
                else "wants a login"
            )
            raise Refused(f"its token server {challenge.token_host} {said}")
        if status != 200:
            raise Unreachable(f"the token server {challenge.token_host} answered {status}")
        answer = self._json(body)
        self._header = f"Bearer {answer.get('token') or answer.get('access_token')}"

    def _basic(self) -> str:
        if self._login is None:
            raise Refused("it wants a login, and there is none")
        pair = f"{self._login.login}:{evaluate(self._login)}"
        return f"Basic {base64.b64encode(pair.encode()).decode()}"

    def _ask(self, url: str, headers: dict[str, str]) -> tuple[int, Message, bytes]:
        request = urllib.request.Request(url, headers=headers)  # noqa: S310 - http or https
        if self._header:
            # A blob is often elsewhere, where the login has no business.
            request.add_unredirected_header("Authorization", self._header)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
                return answer.status, answer.headers, answer.read(MAX_MANIFEST)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.headers, b""
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(self._why(url, error)) from error

    def _why(self, url: str, error: Exception) -> str:
        host = urllib.parse.urlsplit(url).netloc
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            return f"{host} shows a certificate that is not trusted here ({reason.verify_message})"
        if isinstance(reason, ssl.SSLError) and "WRONG_VERSION" in str(reason).upper():
            return (
                f"{host} speaks plain http; enroot does so too where its configuration (not the"
                " job's environment) has ENROOT_ALLOW_HTTP yes"
            )
        return f"{host} does not answer ({reason})"

    def _json(self, body: bytes) -> dict[str, Any]:
        try:
            found = json.loads(body)
        except ValueError as error:
            raise Unreachable(f"{self.name} gave an answer that is not JSON") from error
        return found if isinstance(found, dict) else {}


def _pick(index: Mapping[str, Any], architecture: str, reference: Reference) -> str:
    found: dict[str | None, str] = {}
    for manifest in index["manifests"]:
        where = manifest.get("platform", {})
        if where.get("os", "linux") == "linux":
            found.setdefault(where.get("architecture"), manifest["digest"])
    if architecture not in found:
        names = ", ".join(sorted(str(name) for name in found if name != "unknown"))
        raise ImportImageError(
            f"{reference.docker()} is not there for {architecture}, only for {names}."
        )
    return found[architecture]


def login_state(name: str, text: str, *, http: bool) -> tuple[str, str]:
    """``ok``, ``warn`` or ``FAIL`` for a registry's login, and why.

    Args:
        name: the registry.
        text: the credentials file.
        http: whether enroot is configured to speak plain http.
    """
    host = credentials.machines(name)[0]
    entry = credentials.find(text, host)
    if entry is None:
        there = ", ".join(e.machine for e in credentials.entries(text)) or "none"
        said = f"no line is for machine {host} (there are: {there})"
        return "FAIL", f"{name}: {said}: `toolkit login {name}`"
    try:
        challenge = Registry(name, None, http=http).challenge()
        if challenge is None:
            return "ok", f"{name}: answers without a login"
        server = credentials.host_of(challenge.token_host) if challenge.token_host else host
        login = credentials.find(text, server, entry.login)
        if login is None:
            said = f"its token server is {server}, and no line is for machine {server}"
            return "FAIL", f"{name}: {said} with login {entry.login}: `toolkit login {name}`"
        Registry(name, login, http=http).check_login()
    except Refused as error:
        return "FAIL", f"{name}: {error}: `toolkit login {name}`"
    except Unreachable as error:
        return "warn", f"{name}: {error}; its login was not tried"
    return "ok", f"{name}: accepts the login {entry.login}"


def machine_architecture() -> str:
    """This machine's architecture in a registry's words."""
    machine = platform.machine()
    return ARCHITECTURES.get(machine, machine)


def evaluate(entry: credentials.Entry) -> str:
    """The password itself; what begins with ``$`` is asked of the shell, as enroot does.

    Raises:
        Refused: Where the command gives none.
    """
    if not entry.password.startswith("$"):
        return entry.password
    # Through stdin, for everybody sees arguments.
    ran = capture(["sh"], EVALUATE_S, text=f"{{ echo {entry.password}\n}} </dev/null\n")
    if not ran.stdout.strip():
        raise Refused(f"the command for the password of {entry.machine} gives none; try it by hand")
    return ran.stdout.strip()
