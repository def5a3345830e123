"""``image.lock``: the image that was pushed, so that a run starts exactly that one."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from toolkit.entrypoint.run_files import write_whole
from toolkit.errors import UsageError
from toolkit.image.reference import parse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from toolkit.image.reference import Reference

FILE_NAME = "image.lock"
BUILD_VARIABLE = "TOOLKIT_IMAGE_BUILD"
BUILD_ARGUMENT = "IMAGE_BUILD"
PYG_LABEL = "org.pyg.version"
HEAD = "# Written by `toolkit push`. `toolkit run` starts exactly this image; commit this file.\n"


@dataclass(frozen=True)
class Pin:
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


def write(pin: Pin, folder: Path) -> Path:
    """Write ``image.lock`` in ``folder``, whole or not at all."""
    text = HEAD + "".join(
        f"{name} = {json.dumps(value)}\n"
        for name, value in (
            ("reference", pin.reference),
            ("digest", pin.digest),
            ("platform", pin.platform),
            ("build", pin.build),
        )
        if value
    )
    if pin.versions:
        # A JSON string is a TOML string too.
        lines = [f"{name} = {json.dumps(value)}\n" for name, value in pin.versions.items()]
        text += "\n[versions]\n" + "".join(lines)
    path = folder / FILE_NAME
    write_whole(path, text, 0o644)
    return path


def pinned(
    image: Reference, folder: Path, say: Callable[[str], None] = lambda _: None
) -> tuple[Reference, str]:
    """``image`` by the digest in ``folder``'s lock, and its build; another image stays as it is.

    Args:
        image: the image that was named.
        folder: where the lock is.
        say: gets a line where the lock decides.

    Raises:
        UsageError: Where the lock cannot be read.
    """
    pin = read(folder)
    if pin is None or image.is_file or image.digest is not None:
        return image, ""
    locked = parse(pin.reference)
    # Docker's spelling is one for all that mean the same, "pyg" and "docker.io/library/pyg:latest".
    if image.push_target() != locked.push_target():
        return image, ""
    found = replace(locked, digest=pin.digest)
    say(f"{FILE_NAME}: {image.docker()} is {found.docker()}")
    return found, pin.build


def read(folder: Path) -> Pin | None:
    """The lock in ``folder``, or None where there is none.

    Raises:
        UsageError: Where the file is damaged.
    """
    path = folder / FILE_NAME
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        return Pin(
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
