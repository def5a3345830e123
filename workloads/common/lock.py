"""Lock files that tell who holds them and that no dead holder keeps.

A lock is made exclusively, which every shared file system keeps. Its holder touches it every few
seconds; one that is no longer touched, or whose holder has died on this machine, is stale.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from typing import TYPE_CHECKING

from toolkit.entrypoint import processes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STALE = 30.0  # seconds without a touch after which a lock is passed over
BEATS = 15  # how often a lock is touched in that time


def acquire(lock: Path) -> bool:
    """Make the lock; False where another process has."""
    try:
        with lock.open("x") as file:
            json.dump(processes.identify(os.getpid()), file)
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
        touched = _touched(lock)
        if touched is None:
            return False  # just removed: look again
        if processes.lives(_holder(lock)) is False:
            return True
        before, since = self._seen.get(lock, (None, 0.0))
        if touched != before:
            since = time.monotonic()
            self._seen[lock] = (touched, since)
        return time.monotonic() - since > self._stale


def holder(lock: Path) -> str:
    """Say who holds a lock."""
    found = _holder(lock)
    return f"process {found['pid']} on {found['host']}" if found.keys() >= {"pid", "host"} else "?"


def _holder(lock: Path) -> dict[str, object]:
    try:
        found = json.loads(lock.read_text())
    except (OSError, ValueError):  # removed meanwhile, or damaged: the disk was full, say
        return {}
    return found if isinstance(found, dict) else {}


def _touched(lock: Path) -> float | None:
    """Tell when a lock was touched; it is opened, because NFS then asks the server."""
    try:
        with lock.open() as file:
            return os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return None
