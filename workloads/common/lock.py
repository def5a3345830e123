"""Lock files that tell who holds them and that no dead holder keeps.

A lock is made exclusively, which every shared file system keeps. Its holder touches it every few
seconds; one that is no longer touched, or whose holder has died on this machine, is stale.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

STALE = 30.0  # seconds without a touch after which a lock is passed over
BEATS = 15  # how often a lock is touched in that time


def acquire(lock: Path) -> bool:
    """Make the lock; False where another process has."""
    try:
        with lock.open("x") as file:
            file.write(f"{socket.gethostname()} {os.getpid()} {_machine()}\n")
    except FileExistsError:
        return False
    except OSError:  # a full disk leaves a lock without a holder
        with contextlib.suppress(OSError):
            lock.unlink()
        raise
    return True


@contextlib.contextmanager
def held(lock: Path, interval: float) -> Iterator[None]:
    """Touch the lock every ``interval`` seconds until the work is done, then remove it."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(interval):
            with contextlib.suppress(OSError):
                os.utime(lock)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        lock.unlink(missing_ok=True)


class Watch:
    """Tells whether locks are still touched, by this process's own clock alone."""

    def __init__(self, stale: float) -> None:
        self._stale = stale
        self._seen: dict[Path, tuple[float, float]] = {}

    def is_stale(self, lock: Path) -> bool:
        """Tell whether its holder is gone."""
        holder, touched = read(lock)
        if holder is None:
            return False  # just removed: look again
        if _has_died(holder):
            return True
        before, since = self._seen.get(lock, (None, 0.0))
        if touched != before:
            since = time.monotonic()
            self._seen[lock] = (touched, since)
        return time.monotonic() - since > self._stale


def read(lock: Path) -> tuple[str | None, float]:
    """Return who holds a lock and when it was touched: opened, because NFS then asks the server."""
    try:
        with lock.open() as file:
            return file.read().strip(), os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return None, 0.0


def _has_died(holder: str) -> bool:
    """Tell whether the holder is known to be gone: a process that ran here and runs no more."""
    words = holder.split()
    if len(words) != 3 or words[2] != _machine() or not words[2]:
        return False
    try:
        os.kill(int(words[1]), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, ValueError):
        return False
    return False


def _machine() -> str:
    """Name the set of processes that a process number belongs to: this boot, this namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""
