"""What the last lines of a rank say of the cause, and what to do about it: one line each.

Standard library only and Python 3.8 clean, as :mod:`toolkit.entrypoint.finish` is.
"""

from __future__ import annotations

import os
import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional, Sequence

OUT_OF_MEMORY = "The job's memory was not enough: ask for more (--mem), or use less at a time."

#: Patterns and what they call for; the first that is found counts, so the more telling come first.
_KNOWN = (
    (
        (
            r"CUDA out of memory",
            r"torch\.(?:cuda\.)?OutOfMemoryError",
            r"CUBLAS_STATUS_ALLOC_FAILED",
        ),
        "The GPU's memory was full: take smaller batches, fewer neighbours or a larger GPU.",
    ),
    (
        (
            r"CUDA driver version is insufficient",
            r"forward compatibility was attempted on non supported",
            r"The NVIDIA driver on your system is too old",
        ),
        "The image's CUDA is newer than the node's driver: take an image with an older CUDA.",
    ),
    (
        (
            r"no kernel image is available for execution",
            r"CUDA error: invalid device function",
            r"is not compatible with the current PyTorch installation",
        ),
        "The image's torch was not built for this GPU: take an image that was.",
    ),
    (
        (r"NCCL version mismatch", r"undefined symbol: nccl"),
        "Two versions of NCCL meet: keep the host's out (LD_LIBRARY_PATH, LD_PRELOAD).",
    ),
    (
        (r"Address already in use", r"EADDRINUSE"),
        "Another process holds the port: unset MASTER_PORT, or set one that is free on every rank.",
    ),
    (
        (r"No space left on device", r"Errno 28\]", r"Disk quota exceeded", r"Errno 122\]"),
        "A file system is full (df -h), or a quota is used up: make room there.",
    ),
    (
        (r"Read-only file system", r"Errno 30\]"),
        "The image cannot be written: write under a mount or /tmp, or use --container-writable.",
    ),
    (
        (
            r"Watchdog caught collective operation timeout",
            r"NCCL (?:timeout|watchdog)",
            r"Timed out waiting \d+ms for (?:recv|send)",
            r"wait timeout after \d+ms",
        ),
        "The ranks waited for one that did not come: see what the others did last (toolkit logs).",
    ),
    (
        (r"ModuleNotFoundError: No module named",),
        "The image lacks a module: add it to the image (toolkit build, toolkit customize).",
    ),
    (
        (r"\.so\S*: cannot open shared object file", r"version `GLIBC\S+' not found"),
        "A library is missing, or one of another system was found first (LD_LIBRARY_PATH).",
    ),
    (
        (r"\b401\b.{0,40}[Uu]nauthorized", r"[Uu]nauthorized.{0,40}\b401\b"),
        "The registry wants a login: toolkit login REGISTRY.",
    ),
    (
        (r"\b429\b.{0,40}[Tt]oo [Mm]any", r"[Tt]oo [Mm]any [Rr]equests", r"toomanyrequests"),
        "The registry limits how often it is asked: log in (toolkit login), or import once.",
    ),
    (
        (r"Illegal instruction", r"\(SIGILL\)"),
        "The image was built for another processor: take nodes that have it (--constraint).",
    ),
    (
        (r"\(SIGBUS\)", r"Bus error", r"unable to (?:open|mmap).{0,40}shared memory"),
        "Shared memory (/dev/shm) was full: use fewer DataLoader workers, or have it enlarged.",
    ),
    (
        (r"Cannot allocate memory", r"std::bad_alloc", r"DefaultCPUAllocator"),
        OUT_OF_MEMORY,
    ),
    (
        (r"can't open file .*No such file", r"FileNotFoundError"),
        "A file is missing as the job sees it: look at its mounts (--mount) and where it starts.",
    ),
)

#: What a rank says that lost another one: it is a victim.
_VICTIM = (
    r"Connection closed by (?:remote )?peer",
    r"Connection reset by peer",
    r"remote process exited or there was a network error",
    r"NCCL communicator was aborted",
    r"lost the other ranks",
    r"failed to recv, got 0 bytes",
    r"Connection was likely closed",
)


def advice(lines: Sequence[str]) -> Optional[str]:
    """What to do about the cause that ``lines`` name; None where they name none that is known."""
    for patterns, what in _KNOWN:
        if _says(lines, patterns):
            return what
    return None


def is_victim(lines: Sequence[str]) -> bool:
    """Whether a rank's last lines only say that another one was lost."""
    return _says(lines, _VICTIM)


def _says(lines: Sequence[str], patterns: Sequence[str]) -> bool:
    text = "\n".join(lines)
    return any(re.search(pattern, text) for pattern in patterns)


def is_full(folder: str) -> bool:
    """Whether nothing more can be written to the file system of ``folder``."""
    try:
        room = os.statvfs(folder)
    except OSError:
        return False
    return room.f_bavail == 0 or (room.f_files > 0 and room.f_favail == 0)
