"""Whether a squashfs file is whole, from its first bytes and its size."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

#: What ``toolkit`` has mksquashfs do. On a torch + PyG image this is 7 times faster than enroot's
#: default (lzo, data not compressed) at 0.4 of its size, and 18 times faster than gzip at 1.03 of
#: its size; zstd at its own default level, 15, saves a seventh of the size for 45 times the time.
OPTIONS = "-comp zstd -Xcompression-level 3 -exit-on-error"

#: Superblock, version 4.0: magic, …, compression at byte 20, …, version at 28, bytes used at 40.
_SUPERBLOCK = struct.Struct("<4s16xH6xHH8xQ")
COMPRESSIONS = {1: "gzip", 2: "lzma", 3: "lzo", 4: "xz", 5: "lz4", 6: "zstd"}


def problem(path: Path) -> str | None:
    """Why the file is no whole squashfs file; None where it is one."""
    try:
        with path.open("rb") as file:
            head = file.read(_SUPERBLOCK.size)
        size = path.stat().st_size
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    return judge(head, size)


def judge(head: bytes, size: int) -> str | None:
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
