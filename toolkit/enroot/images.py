"""The folder of imported images: squashfs files named by digest, on storage that all nodes see.

Beside ``sha256-HEX.sqsh`` stands ``sha256-HEX.json``: what it was imported from. Its time is that
of the last run that used it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.enroot import site
from toolkit.entrypoint.run_files import write_whole
from toolkit.errors import ToolkitError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import ModuleType

    from toolkit.image.reference import Reference

#: What ``toolkit`` has mksquashfs do. On a torch + PyG image this is 7 times faster than enroot's
#: default (lzo, data not compressed) at 0.4 of its size, and 18 times faster than gzip at 1.03 of
#: its size; zstd at its own default level, 15, saves a seventh of the size for 45 times the time.
SQUASH_OPTIONS = "-comp zstd -Xcompression-level 3 -exit-on-error"

#: Superblock, version 4.0: magic, …, compression at byte 20, …, version at 28, bytes used at 40.
_SUPERBLOCK = struct.Struct("<4s16xH6xHH8xQ")
COMPRESSIONS = {1: "gzip", 2: "lzma", 3: "lzo", 4: "xz", 5: "lz4", 6: "zstd"}

FOLDER = "images"
_NAME = re.compile(r"sha256-[0-9a-f]{64}\.json")
LEFTOVER_S = 24 * 3600  # a file that is being written is younger


@dataclass(frozen=True)
class Imported:
    """One imported image that is there and whole."""

    path: Path
    record: dict[str, Any]

    @property
    def digest(self) -> str:
        """Of the manifest."""
        return str(self.record["digest"])


@dataclass(frozen=True)
class Unused:
    """An image, or a leftover of an import, that is removed; or why it is not."""

    path: Path
    size: int
    age_s: float
    why_it_stays: str = ""


def folder(images: str | None, cwd: Path) -> Path:
    """Where imported images are: as set, else ``images`` in the current directory."""
    return cwd / Path(images or FOLDER).expanduser()


class Images:
    def __init__(self, path: Path) -> None:
        self.path = path

    def file(self, digest: str) -> Path:
        """Where the image with this digest is, or will be."""
        return self.path / f"{digest.replace(':', '-')}.sqsh"

    def record(self, digest: str) -> Path:
        """Where it is written what that file was imported from."""
        return self.file(digest).with_suffix(".json")

    def find(self, digest: str) -> Imported | None:
        """The image of a manifest, or of a list that was imported here; None if it is not whole."""
        found = self._whole(self.record(digest))
        if found:
            return found
        for path in self._records():
            record = _read(path)
            if record and record.get("index") == digest:
                return self._whole(path)
        return None

    def knows(self, reference: Reference) -> bool:
        """Whether any image of the reference's repository was imported here."""
        return any(
            (_read(path) or {}).get("repository") == reference.repository
            for path in self._records()
        )

    def used(self, image: Imported) -> None:
        """Note that a run uses it, so that ``--clean`` leaves it."""
        with contextlib.suppress(OSError):  # another user's; then the time of reading counts
            os.utime(image.path.with_suffix(".json"))

    def write_record(self, record: dict[str, Any]) -> None:
        write_whole(self.record(record["digest"]), json.dumps(record, indent=2) + "\n")

    def unused(self, age_s: float) -> Iterator[tuple[Path, float]]:
        """Images that no run has used for ``age_s`` seconds, and leftovers; with their age."""
        now = time.time()
        for path in self.path.glob("sha256-*.sqsh"):
            times = [path.stat().st_mtime, path.stat().st_atime]
            with contextlib.suppress(OSError):
                times.append(path.with_suffix(".json").stat().st_mtime)
            if now - max(times) >= age_s:
                yield path, now - max(times)
        for path in self.path.glob(".sha256-*"):
            age = now - path.stat().st_mtime
            if age >= LEFTOVER_S:
                yield path, age

    def clean(self, age_s: float, *, dry_run: bool) -> Iterator[Unused]:
        """Remove what no run has used for ``age_s`` seconds; or, dry, only find it."""
        for path, age in self.unused(age_s):
            size = path.stat().st_size
            try:
                if not dry_run:
                    path.unlink()
                    if path.suffix == ".sqsh":
                        path.with_suffix(".json").unlink(missing_ok=True)
            except OSError as error:
                yield Unused(path, size, age, error.strerror or str(error))
                continue
            yield Unused(path, size, age)

    def _records(self) -> Iterator[Path]:
        with contextlib.suppress(OSError):
            yield from (path for path in self.path.iterdir() if _NAME.fullmatch(path.name))

    def _whole(self, record_path: Path) -> Imported | None:
        record = _read(record_path)
        path = record_path.with_suffix(".sqsh")
        if record is None or not path.exists() or path.stat().st_size != record.get("size"):
            return None
        return None if squashfs_problem(path) else Imported(path, record)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and "digest" in record else None


# ---- squashfs files: whether one is whole, from its first bytes and its size


def squashfs_problem(path: Path) -> str | None:
    """Why the file is no whole squashfs file; None where it is one."""
    try:
        with path.open("rb") as file:
            head = file.read(_SUPERBLOCK.size)
        size = path.stat().st_size
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    return judge_squashfs(head, size)


def judge_squashfs(head: bytes, size: int) -> str | None:
    """The same from the first bytes and the size."""
    if len(head) < _SUPERBLOCK.size:
        return f"it has {size} bytes, too few for a squashfs file"
    magic, compression, major, _minor, used = _SUPERBLOCK.unpack_from(head)
    if magic != b"hsqs" or major != 4:
        return "it is no squashfs file of version 4"
    if compression not in COMPRESSIONS:
        return f"its compression {compression} is unknown"
    if size < used:
        return f"it has {size} bytes of {used}: it was cut short"
    return None


# ---- what a job starts


def find_known(reference: Reference, images: Images) -> Imported | None:
    """The imported file of an image, as far as that is known without a registry: by digest."""
    return images.find(reference.digest) if reference.digest else None


def resolve(
    reference: Reference,
    images: Images,
    environ: Mapping[str, str],
    *,
    import_first: bool,
    say: Callable[[str], None],
) -> Imported | None:
    """The imported file that a job starts in an image's place; None where there is none.

    A digest is looked for in the folder alone. A tag may have moved since the import, so the
    registry is asked what it names now, but only where that repository was ever imported.

    Args:
        reference: an image in a registry.
        images: the folder.
        environ: the environment of enroot.
        import_first: whether it is imported where it is not there, which may take long.
        say: gets what the user should know.

    Raises:
        ToolkitError: Where the image was to be imported and could not be.
    """
    found = find_known(reference, images)
    if found is None and import_first:
        found = _importing().fetch(reference, images, site.find(environ), environ, say=say)
    elif found is None and reference.digest is None and images.knows(reference):
        found = _look_up(reference, images, environ, say)
    if found:
        images.used(found)
        say(f"using the imported file of {reference.docker()}: {found.path}")
    return found


def _look_up(
    reference: Reference, images: Images, environ: Mapping[str, str], say: Callable[[str], None]
) -> Imported | None:
    """The file of what the registry has under a tag now."""
    try:
        found = images.find(_importing().look_up(reference, site.find(environ)).digest)
    except ToolkitError as error:
        say(f"{error} The imported files in {images.path} are not used.")
        return None
    if found is None:
        say(
            f"{reference.docker()} is another image by now than the one in {images.path}: every"
            " node imports it; --import does that once for all"
        )
    return found


def _importing() -> ModuleType:
    """Loaded where a registry is asked: HTTP and TLS are half the time of a dry run."""
    return import_module("toolkit.enroot.importing")
