"""The build context: what is sent to the engine, and what in it deserves a warning."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from toolkit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

LARGE = 200 * 1000**2  # bytes; what takes seconds to send, on every build
LARGEST_SHOWN = 5
UNITS = ("B", "kB", "MB", "GB")

SECRET_NAMES = (
    ".env", "*.env", ".env.*", ".netrc", "_netrc", ".pypirc", ".git-credentials", ".credentials",
    ".dockercfg", "id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "*.pem", "*.key", "*.p12", "*.pfx",
    "*.jks", "*.kdbx", "credentials", "credentials.*", "secrets", "secrets.*", "*.secret",
    "kaggle.json", "service-account*.json", "*.ovpn", "htpasswd", ".htpasswd", "*.token",
)  # fmt: skip
SECRET_FOLDERS = (".ssh", ".aws", ".gnupg", ".kube", ".azure", ".huggingface", ".secrets")
SECRET_PATHS = (".docker/config.json", ".config/gcloud/*", ".config/enroot/*", ".envs/*")
NOT_SECRET = ("*.example", "*.sample", "*.template", "*.pub")


@dataclass(frozen=True)
class Context:
    """What a build would send: paths relative to the root, and sizes in bytes."""

    files: int
    size: int
    largest: tuple[tuple[str, int], ...]
    """The largest entries of the top folder, a folder with all that is in it."""
    warnings: tuple[str, ...]


def scan(root: Path, dockerfile: Path) -> Context:
    """Look at all that ``.dockerignore`` lets through. Links are counted as links.

    Raises:
        UsageError: Where the context or the Dockerfile is not there, or a file cannot be read.
    """
    if not root.is_dir():
        raise UsageError(f"build context {str(root)!r} is not a folder")
    if not dockerfile.is_file():
        raise UsageError(
            f"there is no Dockerfile at {str(dockerfile)!r}: name yours with --file, "
            "or copy the toolkit's own as a start"
        )
    patterns = _patterns(root)
    sizes: dict[str, int] = {}
    for path in included(root, patterns, dockerfile):
        info = (root / path).lstat()
        if stat.S_ISDIR(info.st_mode):
            continue
        sizes[path] = info.st_size if stat.S_ISREG(info.st_mode) else 0
    largest = _largest(sizes)
    total = sum(sizes.values())
    warnings = []
    if not (root / ".dockerignore").is_file():
        warnings.append(
            f"there is no .dockerignore in {root}, so all of it is sent; write one that starts "
            "with `*` and lets through only what the Dockerfile copies (`!src`)"
        )
    if total > LARGE:
        entries = ", ".join(f"{path} ({human(size)})" for path, size in largest)
        warnings.append(f"the context has {human(total)}; the largest: {entries}")
    secrets = [path for path in sizes if secret_like(path)]
    if secrets:
        warnings.append(
            f"these may be secrets, and would be sent and perhaps copied into the image: "
            f"{_some(secrets)}; list them in .dockerignore"
        )
    if any(path.startswith(".git/") for path in sizes):
        warnings.append("the history in .git is sent too; list .git in .dockerignore")
    warnings += root_only(patterns, sizes)
    return Context(files=len(sizes), size=total, largest=largest, warnings=tuple(warnings))


def digest(root: Path, dockerfile: Path, more: Mapping[str, str]) -> str:
    """Name what a build is made from: 16 hexadecimal digits, the same for the same content.

    Args:
        root: the context; all that ``.dockerignore`` lets through counts, by name, mode and bytes.
        dockerfile: counts too.
        more: what else decides the build, by name.

    Raises:
        UsageError: Where a file cannot be read.
    """
    found = hashlib.sha256(json.dumps(dict(more)).encode() + dockerfile.read_bytes())
    try:
        for path in included(root, _patterns(root), dockerfile):
            info = (root / path).lstat()
            found.update(os.fsencode(f"{path}\0{info.st_mode & 0o111:o}\0"))
            if stat.S_ISREG(info.st_mode):
                with (root / path).open("rb") as file:
                    found.update(hashlib.file_digest(file, "sha256").digest())
            elif stat.S_ISLNK(info.st_mode):
                found.update(os.fsencode((root / path).readlink()))
    except OSError as error:
        raise _unreadable(root, error) from error
    return found.hexdigest()[:16]


def _unreadable(root: Path, error: OSError) -> UsageError:
    return UsageError(
        f"build context {str(root)!r}: {error.filename} cannot be read ({error.strerror}); "
        "list it in .dockerignore"
    )


def _patterns(root: Path) -> list[str]:
    ignore = root / ".dockerignore"
    return ignore_patterns(ignore.read_text(encoding="utf-8")) if ignore.is_file() else []


def included(root: Path, patterns: Sequence[str], dockerfile: Path) -> list[str]:
    """The paths that are sent, by docker-py's own reading of ``.dockerignore``."""
    from docker.utils.build import exclude_paths  # noqa: PLC0415 - heavy, and only for builds

    inside = dockerfile.is_relative_to(root)
    # The Dockerfile is always sent, even out of an ignored folder.
    name = dockerfile.relative_to(root).as_posix() if inside else "Dockerfile"
    try:
        return sorted(exclude_paths(str(root), list(patterns), name))
    except OSError as error:
        raise _unreadable(root, error) from error


def ignore_patterns(text: str) -> list[str]:
    """The patterns of a ``.dockerignore``, without comments and empty lines."""
    lines = (line.strip() for line in text.removeprefix("\ufeff").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def secret_like(path: str) -> bool:
    """Whether a path is named as keys, tokens and password files are."""
    pure = PurePosixPath(path)
    name = pure.name.lower()
    if any(fnmatchcase(name, pattern) for pattern in NOT_SECRET):
        return False
    return (
        any(fnmatchcase(name, pattern) for pattern in SECRET_NAMES)
        or any(part in SECRET_FOLDERS for part in pure.parts[:-1])
        or any(fnmatchcase(path, f"{pattern}") or fnmatchcase(path, f"*/{pattern}")
               for pattern in SECRET_PATHS)
    )  # fmt: skip


def root_only(patterns: Iterable[str], paths: Iterable[str]) -> list[str]:
    """Warn of patterns that miss what they seem to mean: ``name/`` covers the top folder alone.

    Git's ignore files match at every depth; ``.dockerignore`` does not.
    """
    found = []
    paths = list(paths)
    for pattern in patterns:
        name = pattern.strip("/")
        if pattern.startswith(("!", "/")) or "/" in name or name in {"*", "**"}:
            continue
        deeper = [
            path
            for path in paths
            if any(fnmatchcase(part, name) for part in PurePosixPath(path).parts[1:])
        ]
        if deeper:
            found.append(
                f".dockerignore: {pattern!r} covers the top folder only, and {_some(deeper)} is "
                f"sent; write '**/{name}' to cover every folder"
            )
    return found


def _largest(sizes: dict[str, int]) -> tuple[tuple[str, int], ...]:
    tops: dict[str, int] = {}
    for path, size in sizes.items():
        top, slash, _ = path.partition("/")
        tops[top + slash] = tops.get(top + slash, 0) + size
    ordered = sorted(tops.items(), key=lambda entry: (-entry[1], entry[0]))
    return tuple(ordered[:LARGEST_SHOWN])


def _some(paths: Sequence[str]) -> str:
    shown = ", ".join(sorted(paths)[:LARGEST_SHOWN])
    more = len(paths) - LARGEST_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def human(size: float) -> str:
    """Bytes in decimal units, as Docker shows them."""
    unit = 0
    while size >= 999.5 and unit < len(UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.3g} {UNITS[unit]}" if size < 999.5 else f"{size:.0f} {UNITS[unit]}"
