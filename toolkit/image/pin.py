"""``image.lock``: the image that was pushed, so that a run starts exactly that one."""

from __future__ import annotations

import json
import os
import tempfile
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.errors import UsageError
from toolkit.image.reference import parse

if TYPE_CHECKING:
    from collections.abc import Mapping

FILE_NAME = "image.lock"
BUILD_VARIABLE = "TOOLKIT_IMAGE_BUILD"
BUILD_ARGUMENT = "IMAGE_BUILD"
PYG_LABEL = "org.pyg.version"
HEAD = "# Written by `toolkit push`. `toolkit run` starts exactly this image; commit this file.\n"


@dataclass(frozen=True)
class Lock:
    """An image as a registry has it."""

    reference: str
    """What was pushed: ``HOST/PATH:TAG``."""
    digest: str
    """The registry's own: ``sha256:…``."""
    platform: str
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of Python, torch and PyG in the image, as far as they are known."""
    build: str = ""
    """The image's own TOOLKIT_IMAGE_BUILD, which can be seen from inside; its digest cannot."""


def declared_build(config: Mapping[str, Any]) -> str:
    """Which build an image says that it is; empty where it does not."""
    environ = dict(entry.partition("=")[::2] for entry in config.get("Env") or [])
    return str(environ.get(BUILD_VARIABLE, ""))


def declared_versions(config: Mapping[str, Any]) -> dict[str, str]:
    """What an image says of itself, where it was not tested: its label and PYTORCH_VERSION."""
    environ = dict(entry.partition("=")[::2] for entry in config.get("Env") or [])
    labels = config.get("Labels") or {}
    found = {"torch": environ.get("PYTORCH_VERSION"), "torch-geometric": labels.get(PYG_LABEL)}
    return {name: version for name, version in found.items() if version}


def write(lock: Lock, folder: Path) -> Path:
    """Write ``image.lock`` in ``folder``, whole or not at all."""
    text = HEAD + "".join(
        f"{name} = {json.dumps(value)}\n"
        for name, value in (
            ("reference", lock.reference),
            ("digest", lock.digest),
            ("platform", lock.platform),
            ("build", lock.build),
        )
        if value
    )
    if lock.versions:
        # A JSON string is a TOML string too.
        lines = [f"{name} = {json.dumps(value)}\n" for name, value in lock.versions.items()]
        text += "\n[versions]\n" + "".join(lines)
    path = folder / FILE_NAME
    descriptor, name = tempfile.mkstemp(dir=folder, prefix=f".{FILE_NAME}.")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path


def pinned(image: str, folder: Path) -> tuple[str, str] | None:
    """``image`` by the digest in ``folder``'s lock, and its build; None for another image's lock.

    Raises:
        UsageError: Where the image or the lock cannot be read.
    """
    named = parse(image)
    lock = read(folder)
    if lock is None or named.is_file or named.digest is not None:
        return None
    locked = parse(lock.reference)
    # Docker's spelling is one for all that mean the same, "pyg" and "docker.io/library/pyg:latest".
    if named.push_target() != locked.push_target():
        return None
    return replace(locked, digest=lock.digest).docker(), lock.build


def read(folder: Path) -> Lock | None:
    """The lock in ``folder``, or None where there is none.

    Raises:
        UsageError: Where the file is damaged.
    """
    path = folder / FILE_NAME
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        return Lock(
            reference=table["reference"],
            digest=table["digest"],
            platform=table["platform"],
            versions=table.get("versions", {}),
            build=table.get("build", ""),
        )
    except FileNotFoundError:
        return None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError) as error:
        raise UsageError(f"{path} is damaged ({error}): push again, or remove it") from error
