"""Mounts of a container, in pyxis's words: ``SRC:DST[:FLAGS]``.

pyxis separates mounts by commas, their parts by colons and flags by ``+``, and cannot escape any of
them. It knows a path by a leading ``/`` or ``.``.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from toolkit.entrypoint.run_files import IN_CONTAINER
from toolkit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from toolkit.options import JobSpec

WORKSPACE = "/workspace"  #: where the current directory goes when no mounts are given

_FLAGS = re.compile(r"[A-Za-z][\w.=-]*(?:[+,][A-Za-z][\w.=-]*)*")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
#: Options whose value is a place to write to, by a word in their names; but what they read is not.
_OUTPUT = re.compile(
    r"(?:^|_)(?:out|save|ckpt|checkpoint|log|result|write|dump|export|tensorboard|artifact|tb(_|$))"
    r"|(?:run|work|root)_?dir$"
)
_INPUT = re.compile(r"^(?:load|resume|from|init|read|input|in|pretrained)(?:_|$)")


@dataclass(frozen=True)
class Mount:
    """One mount; ``source`` is absolute, or pyxis's ``tmpfs`` or ``umount``."""

    source: str
    target: str
    flags: str = ""  #: joined with ``+``

    def __str__(self) -> str:
        return ":".join(filter(None, (self.source, self.target, self.flags)))


def parse(
    items: Iterable[str],
    cwd: Path,
    environ: Mapping[str, str],
    exists: Callable[[str], bool] = os.path.exists,
) -> tuple[list[Mount], list[str]]:
    """The mounts that ``SRC:DST[:FLAGS]``, ``SRC``, or a list of these with commas, stand for.

    Variables and ``~`` are expanded, relative sources made absolute; ``SRC`` alone is mounted at
    its own path.

    Returns:
        The mounts, and notes about what may not work.

    Raises:
        UsageError: if one cannot be passed to pyxis, has a relative source that does not exist, or
            a target that is relative, the root, reserved, or given twice.
    """
    mounts: list[Mount] = []
    notes: list[str] = []
    for item in items:
        for text in _split(item):
            mount = _parse(text, cwd, environ)
            if mount.source.startswith("/"):
                notes += _doubts(mount, text, exists)
            for other in mounts:
                if other.target == mount.target:
                    msg = f"mounts {other} and {mount}: both are at {mount.target}. Leave one out."
                    raise UsageError(msg)
            mounts.append(mount)
    return mounts, notes


def passable(path: str, what: str) -> None:
    """Raise UsageError for a path with a comma or colon, which pyxis cannot mount."""
    if set(",:\n") & set(path):
        msg = (
            f"{what} is {path}: pyxis cannot mount a path with a comma, a colon or a line break."
            " Choose another folder with --runs DIR."
        )
        raise UsageError(msg)


def unmounted_outputs(command: Iterable[str], targets: Iterable[str]) -> list[str]:
    """Notes about options of ``command`` that name an output inside the image, on no mount.

    Args:
        command: the words of the command.
        targets: what is mounted, and where one can write.
    """
    places = [*targets, "/dev", "/proc"]
    notes = []
    words = list(command)
    for number, word in enumerate(words):
        option, equals, value = word.partition("=")
        if not equals and word.startswith("-"):
            value = words[number + 1] if number + 1 < len(words) else ""
        name = re.sub("[-.]", "_", option.lstrip("-").lower())
        if not value.startswith("/") or _INPUT.search(name):
            continue
        if (option == "-o" or _OUTPUT.search(name)) and not under(_normal(value), places):
            notes.append(
                f"{option} {value} is inside the image, on no mount, where nothing can be written"
                f" and nothing is kept: add --mount HOST_DIR:{PurePosixPath(value).parent}, or"
                " --container-writable if it may vanish with the container"
            )
    return notes


def decide(
    spec: JobSpec, cwd: Path, environ: Mapping[str, str], exists: Callable[[str], bool]
) -> tuple[list[Mount], list[str]]:
    """The mounts that were given; without any, the current directory."""
    if spec.container_mounts:
        return parse(spec.container_mounts, cwd, environ, exists)
    if set(",:\n") & set(str(cwd)):
        msg = (
            f"the current directory is {cwd}: pyxis cannot mount a path with a comma, a colon or a"
            " line break. Work in another one, or give --container-mounts and --runs DIR."
        )
        raise UsageError(msg)
    mount = Mount(str(cwd), WORKSPACE)
    return [mount], _doubts(mount, str(mount), lambda _: True)


def workdir(spec: JobSpec, cwd: Path, mounts: list[Mount]) -> str | None:
    """Where the command starts: as given, else where the current directory is mounted."""
    if spec.container_workdir:
        if not spec.container_workdir.startswith("/") or "\n" in spec.container_workdir:
            msg = (
                f"--container-workdir {spec.container_workdir}: must be an absolute path in the"
                f" container, such as {WORKSPACE}."
            )
            raise UsageError(msg)
        return spec.container_workdir
    here = [mount for mount in mounts if under(str(cwd), [mount.source])]
    if not here:
        return None
    nearest = max(here, key=lambda mount: len(mount.source))
    rest = os.path.relpath(cwd, nearest.source)
    return nearest.target if rest == "." else f"{nearest.target}/{rest}"


def _split(item: str) -> list[str]:
    """The mounts of one option: pyxis's own lists are taken, and flags joined with a comma."""
    found: list[str] = []
    for piece in item.split(","):
        if found and found[-1].count(":") == 2 and _FLAGS.fullmatch(piece):
            found[-1] += f"+{piece}"
        else:
            found.append(piece)
    if len(found) > 1 and not all(re.match(r"[/.~$][^:]*:[/~$]", text) for text in found):
        msg = (
            f"--container-mounts {item!r}: a comma in a path cannot be passed to pyxis. Mount the"
            " directory above it, or use a link without one."
        )
        raise UsageError(msg)
    return found


def _parse(text: str, cwd: Path, environ: Mapping[str, str]) -> Mount:
    parts = text.split(":")
    flags = parts[2] if len(parts) == 3 else ""
    if len(parts) > 3 or (len(parts) == 3 and not _FLAGS.fullmatch(flags)):
        msg = (
            f"--container-mounts {text!r}: is not SRC:DST[:FLAGS]; a colon in a path cannot be"
            " passed to pyxis. Mount the directory above it, or use a link without one."
        )
        raise UsageError(msg)
    if not parts[0] or (len(parts) > 1 and not parts[1]):
        msg = f"--container-mounts {text!r}: lacks a path. Write SRC:DST[:FLAGS]."
        raise UsageError(msg)
    source = _expand(parts[0], text, environ)
    if source not in {"tmpfs", "umount"} or len(parts) == 1:
        source = absolute(source, cwd)
    target = _expand(parts[1], text, environ) if len(parts) > 1 else source
    if set(",:\n") & set(source + target):
        msg = f"--container-mounts {text!r}: stands for {source}:{target}, and a comma, a colon or"
        raise UsageError(f"{msg} a line break in a path cannot be passed to pyxis.")
    if not target.startswith("/"):
        msg = f"--container-mounts {text!r}: {target} must be an absolute path in the container."
        raise UsageError(msg)
    target = _normal(target)
    if target == "/":
        msg = (
            f"--container-mounts {text!r}: the target is the container's root, which would hide the"
            " whole image. Write a directory below it."
        )
        raise UsageError(msg)
    if under(target, [IN_CONTAINER]):
        msg = f"--container-mounts {text!r}: {IN_CONTAINER} is where the run directory goes."
        raise UsageError(msg)
    return Mount(source, target, flags.replace(",", "+"))


def _doubts(mount: Mount, text: str, exists: Callable[[str], bool]) -> list[str]:
    """What may not work with a mount; an error where it certainly will not."""
    notes = []
    if re.search(r"\s", mount.source + mount.target):
        notes.append(f"mount {mount}: white space in a path needs pyxis 0.24 or newer")
    if not exists(mount.source):
        if not text.startswith(("/", "~", "$")):
            msg = f"--container-mounts {text!r}: {mount.source} does not exist."
            raise UsageError(msg)
        notes.append(f"{mount.source} is not on this machine; it must be on the compute nodes")
    return notes


def _expand(path: str, text: str, environ: Mapping[str, str]) -> str:
    """``path`` with variables and a leading ``~`` replaced."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if not environ.get(name):
            msg = f"--container-mounts {text!r}: {name} is not set in your environment."
            raise UsageError(msg)
        return environ[name]

    if path == "~" or path.startswith("~/"):
        path = "$HOME" + path[1:]
    elif path.startswith("~"):
        path = os.path.expanduser(path)  # noqa: PTH111 - leaves an unknown user's ~ as it is
    return _VARIABLE.sub(value, path)


def absolute(path: str, cwd: Path) -> str:
    return _normal(str(cwd / path))


def _normal(path: str) -> str:
    """Without ``.``, ``..`` and doubled slashes, as a shell's ``cd`` reads a path."""
    return re.sub("^//+", "/", os.path.normpath(path))


def under(path: str, places: Iterable[str]) -> bool:
    return any(PurePosixPath(path).is_relative_to(place) for place in places)
