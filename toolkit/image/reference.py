"""Image references: one value, and how Docker, enroot and pyxis each spell it.

Docker writes ``HOST/PATH``, enroot ``HOST#PATH``, and what enroot makes of a slash changed between
its versions: 3.5.0 looks for ``nvcr.io/nvidia/pyg`` on Docker Hub, 4.x takes ``localhost/team/img``
for a Hub namespace. The spellings given here are those that both read the same way.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn, cast

from toolkit.errors import UsageError

DOCKER_HUB = "docker.io"
# Names of one registry; only the last one answers enroot 3.x, which takes a host as it is.
HUB_NAMES = (DOCKER_HUB, "index.docker.io", "registry-1.docker.io")

# A local engine's image (`dockerd`) differs from a registry's only for enroot and pyxis.
Scheme = Literal["docker", "dockerd"]
SCHEMES = ("docker", "dockerd")

HOST = re.compile(
    r"([a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?(\.[a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?)*"
    r"|\[[0-9a-fA-F:]+\])(:(?P<port>[0-9]{1,5}))?"
)
PATH_COMPONENT = re.compile(r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*")
TAG = re.compile(r"[a-zA-Z0-9_][a-zA-Z0-9_.-]{0,127}")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
# enroot's class for user names, less what would make the rest of a reference ambiguous (`/` `:`).
USER = re.compile(r"[a-zA-Z0-9_.!~*'()%;&=+$,@-]+")
#: What registries and engines call the machines of uname(1), where that differs.
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
MAX_NAME = 255  # Docker's limit for HOST/PATH


@dataclass(frozen=True, kw_only=True)
class Reference:
    """An image in a registry, in a local engine, or in a squashfs file."""

    path: str
    """Repository in full (``library/ubuntu`` on Docker Hub), or the file's path."""
    registry: str | None
    """Host and port; ``docker.io`` for Docker Hub; None for a squashfs file."""
    tag: str | None = None
    digest: str | None = None
    """``sha256:`` and 64 hexadecimal digits; it decides over the tag."""
    user: str | None = None
    """enroot's ``USER@``: which of the user's credentials to take. Docker has no such part."""
    scheme: Scheme = "docker"

    @property
    def is_file(self) -> bool:
        """Whether this is a squashfs file, which only compute nodes may be able to see."""
        return self.registry is None

    @property
    def repository(self) -> str:
        """``HOST/PATH`` as Docker takes it, with the short form on Docker Hub.

        Raises:
            UsageError: For a squashfs file.
        """
        if self.registry is None:
            raise UsageError(
                f"image {self.path!r} is a squashfs file, which Docker cannot use: "
                "give the reference it was imported from"
            )
        if self.registry == DOCKER_HUB:
            short = self._hub_path
            return f"{DOCKER_HUB}/{short}" if _starts_with_host(short) else short
        # Docker takes a first part without a dot or port for a Hub namespace.
        registry = self.registry if _is_host(self.registry) else f"{self.registry}:443"
        return f"{registry}/{self.path}"

    @property
    def _hub_path(self) -> str:
        official = self.path.startswith("library/") and self.path.count("/") == 1
        return self.path.removeprefix("library/") if official else self.path

    def docker(self) -> str:
        """``HOST/PATH:TAG``, or ``HOST/PATH@DIGEST``, which pulls exactly that image.

        Raises:
            UsageError: For a squashfs file.
        """
        if self.digest:
            return f"{self.repository}@{self.digest}"
        return f"{self.repository}:{self.tag}" if self.tag else self.repository

    def pyxis(self) -> str:
        """The value of ``--container-image``, for srun's argv: no quotes, no backslash.

        A digest is spelled ``HOST#PATH:sha256:HEX``, the only form that enroot 3.5.0 reads too.
        """
        if self.is_file:
            return self.path
        if self.scheme == "dockerd":
            return f"dockerd://{self.docker()}"
        if self.registry != DOCKER_HUB:
            name = f"{self.registry}#{self.path}"
        elif _starts_with_host(self._hub_path):
            name = f"{HUB_NAMES[-1]}#{self.path}"
        else:
            name = self._hub_path
        user = f"{self.user}@" if self.user else ""
        version = self.digest or self.tag
        return f"{user}{name}:{version}" if version else f"{user}{name}"

    def enroot(self) -> str:
        """The URI for ``enroot import``; for a file its path, which ``enroot create`` takes."""
        text = self.pyxis()
        return text if self.is_file or self.scheme == "dockerd" else f"docker://{text}"

    def sbatch(self) -> str:
        """The line for the head of a batch script, where a bare ``#`` would start a comment."""
        value = self.pyxis().replace("\\", "\\\\").replace('"', '\\"')
        return f'#SBATCH --container-image="{value}"'

    def push_target(self) -> tuple[str, str]:
        """Repository and tag, never without a tag: Docker would push every tag there is.

        Raises:
            UsageError: For a squashfs file or a digest, neither of which can be pushed to.
        """
        if self.digest:
            raise UsageError(
                f"image {self.docker()!r}: a push needs a tag, not a digest; "
                f"write {self.repository}:{self.tag or 'latest'}"
            )
        return self.repository, self.tag or "latest"


def parse(text: str) -> Reference:
    """Read a reference in Docker's, enroot's or pyxis's spelling.

    Raises:
        UsageError: Where it is malformed; the message quotes it and the part that is wrong.
    """
    if not text:
        raise UsageError("the image reference is empty: write HOST/PATH:TAG or FILE.sqsh")
    scheme, rest = _split_scheme(text)
    if rest.startswith(("/", "./", "../", "~/")) or rest.endswith((".sqsh", ".squashfs")):
        if scheme:
            _fail(text, f"{scheme}://", "does not go with a squashfs file; leave it out")
        return Reference(path=_file_path(rest), registry=None)

    rest, digest = _split_digest(text, rest)
    rest, user = _split_user(text, rest)
    registry, rest = _split_registry(text, rest)
    path, colon, tag = rest.partition(":")
    _check_path(text, path)
    if colon and not TAG.fullmatch(tag):
        _fail(text, tag, "is not a tag: letters, digits, '_', '.' and '-', 128 at most")
    if registry == DOCKER_HUB and "/" not in path:
        path = f"library/{path}"
    if len(registry) + 1 + len(path) > MAX_NAME:
        _fail(text, path, f"is too long: host and path may have {MAX_NAME} characters")
    if scheme == "dockerd" and (digest or user):
        _fail(text, digest or f"{user}@", "does not go with dockerd://, which takes NAME:TAG")
    return Reference(
        path=path,
        registry=registry,
        tag=tag or None,
        digest=digest,
        user=user,
        scheme=cast("Scheme", scheme or "docker"),
    )


def _split_scheme(text: str) -> tuple[str, str]:
    scheme, separator, rest = text.partition("://")
    if not separator:
        return "", text
    if scheme not in SCHEMES or "://" in rest:
        bad = f"{scheme}://" if scheme not in SCHEMES else rest.partition("://")[0] + "://"
        _fail(text, bad, "is not a scheme here; write docker:// once, dockerd:// once, or none")
    return scheme, rest


def _file_path(path: str) -> str:
    """Pyxis knows a file only by a ``.`` or ``/`` in front."""
    if path.startswith("~/"):
        return str(Path(path).expanduser())
    return path if path.startswith(("/", "./", "../")) else f"./{path}"


def _split_digest(text: str, rest: str) -> tuple[str, str | None]:
    found = re.search(r"[@:](sha\d+:.*)$", rest, re.DOTALL)
    if not found:
        return rest, None
    digest = found[1]
    if not DIGEST.fullmatch(digest):
        _fail(text, digest, "is not a digest: sha256: and 64 lower-case hexadecimal digits")
    return rest[: found.start()], digest


def _split_user(text: str, rest: str) -> tuple[str, str | None]:
    user, at, name = rest.rpartition("@")
    if not at:
        return rest, None
    if "/" in user or "#" in user:
        _fail(text, f"@{name}", "is not a digest: write @sha256:HEX, or :TAG for a tag")
    if ":" in user:
        _fail(text, f"{user.partition(':')[0]}:***@", "holds a password; only USER@ goes there")
    if not USER.fullmatch(user):
        _fail(text, f"{user}@", "is not a user name that enroot takes")
    return name, user


def _split_registry(text: str, rest: str) -> tuple[str, str]:
    registry, separator, path = rest.partition("#")
    if separator and "#" in path:
        _fail(text, f"#{path.partition('#')[2]}", "is one '#' too many: HOST#PATH has one")
    if not separator:
        registry, separator, path = rest.partition("/")
        if not (separator and _is_host(registry)):
            return DOCKER_HUB, rest
    host = HOST.fullmatch(registry)
    if not host or int(host["port"] or 0) > 65535:
        _fail(text, registry, "is not a registry: HOST or HOST:PORT")
    return (DOCKER_HUB if registry.lower() in HUB_NAMES else registry), path


def _check_path(text: str, path: str) -> None:
    if re.fullmatch(r"[0-9a-f]{64}", path):
        _fail(text, path, "is an image ID, which no registry knows; give the image's name")
    for component in path.split("/"):
        if PATH_COMPONENT.fullmatch(component):
            continue
        if component and PATH_COMPONENT.fullmatch(component.lower()):
            _fail(text, component, f"has capital letters; write {component.lower()!r}")
        _fail(
            text,
            component,
            "is not a part of an image's path: lower-case letters and digits, "
            "with '.', '_' or '-' between them",
        )


def _is_host(name: str) -> bool:
    """Docker's own rule for whether a first part is a registry or a Docker Hub namespace."""
    return "." in name or ":" in name or name == "localhost"


def _starts_with_host(path: str) -> bool:
    first, slash, _ = path.partition("/")
    return bool(slash) and _is_host(first)


def _fail(text: str, bad: str, why: str) -> NoReturn:
    # `USER:PASSWORD@` may stand in what was typed; a registry's port may too, and is shown.
    shown = re.sub(r"^([\w+.-]+://)?([^:@/#]+):(?!\d+[/#]).*@(?!sha\d)", r"\1\2:***@", text)
    raise UsageError(f"image reference {shown!r}: {bad!r} {why}")
