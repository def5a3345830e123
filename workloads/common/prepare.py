"""Make a folder once, however many processes, nodes and jobs want it at the same time.

One process (local rank 0 of each node) calls ``prepare``; the rest call ``wait_for``. A folder is
complete when its name is there: it is written under another name and renamed. Who may write is
settled by a lock file that is made exclusively, which every shared file system keeps. A lock says
who holds it, and its holder touches it every few seconds; one that is no longer touched, or whose
holder has died on this machine, is passed over by making the lock of the next generation, so that
of many that wait exactly one takes over.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from workloads.common.errors import WorkloadError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

STALE = 30.0  # seconds without a touch after which a lock is passed over
BEATS = 15  # how often a lock is touched in that time
POLL = 0.1  # seconds between two looks at the folder


def default_root(environ: Mapping[str, str]) -> Path:
    """Choose where data sets are kept: $TOOLKIT_DATA, the user's cache, or a temporary folder."""
    if environ.get("TOOLKIT_DATA"):
        return Path(environ["TOOLKIT_DATA"])
    cache = environ.get("XDG_CACHE_HOME")
    if not cache and environ.get("HOME"):
        cache = f"{environ['HOME']}/.cache"
    if cache:
        # Tried, because permissions do not tell: root may write anywhere, but not to /proc.
        root = Path(cache) / "toolkit"
        with contextlib.suppress(OSError):
            root.mkdir(parents=True, exist_ok=True)
            if os.access(root, os.W_OK | os.X_OK):
                return root
    # Homes are read-only in many containers. Anyone may write to the temporary folder, so what
    # another user has put there under this name is not taken for our data.
    root = Path(tempfile.gettempdir()) / f"toolkit-{os.getuid()}"
    if root.exists() and root.stat().st_uid != os.getuid():
        msg = f"{root} belongs to another user; choose a folder by --data-dir or TOOLKIT_DATA"
        raise WorkloadError(msg)
    return root


def prepare(
    root: Path,
    name: str,
    build: Callable[[Path], None],
    *,
    timeout: float,
    check: Callable[[], None] = lambda: None,
    stale: float = STALE,
) -> Path:
    """Return ``root/name``, made by ``build`` in this process or by another one meanwhile.

    Args:
        root: A folder, made where it is missing; node-local or shared.
        name: The folder to make; it must stand for everything that decides its content.
        build: Fills the empty folder that it is given.
        timeout: Seconds to wait for another process that is making it; no limit on ``build``.
        check: Called while waiting; raises to end the wait.
        stale: Seconds after which a lock that nobody touches is passed over; the same for all.

    Raises:
        WorkloadError: It cannot be written, or another process did not finish it in time.
    """
    watch = _Watch(stale)
    deadline = time.monotonic() + timeout
    try:
        root.mkdir(parents=True, exist_ok=True)
        while not _is_there(root, name):
            locks = _locks(root, name)
            if not locks or watch.is_stale(locks[-1]):
                generation = int(locks[-1].suffix[1:]) + 1 if locks else 0
                lock = root / f".{name}.lock.{generation}"
                if _acquire(lock):
                    with _held(lock, stale / BEATS):
                        _make(root, name, build, passed_over=locks)
                    continue
            _pause(deadline, timeout, root / name, check, locks)
    except MemoryError as error:
        msg = f"not enough memory to prepare the data set {name}: {error}"
        raise WorkloadError(msg) from error
    except OSError as error:
        raise _unusable(root / name, error) from error
    return root / name


def wait_for(
    root: Path, name: str, *, timeout: float, check: Callable[[], None] = lambda: None
) -> Path:
    """Return ``root/name`` once it is there.

    Raises:
        WorkloadError: It is not there after ``timeout`` seconds, or ``root`` cannot be read.
    """
    deadline = time.monotonic() + timeout
    try:
        while not _is_there(root, name):
            _pause(deadline, timeout, root / name, check, _locks(root, name))
    except OSError as error:
        raise _unusable(root / name, error) from error
    return root / name


def _unusable(folder: Path, error: OSError) -> WorkloadError:
    return WorkloadError(
        f"cannot prepare the data set in {folder}: {error}; "
        f"choose a folder that can be written by --data-dir or TOOLKIT_DATA"
    )


def _names(root: Path) -> list[str]:
    """List the folder: unlike a look at one path, it is not answered from an old "no such file"."""
    try:
        return [path.name for path in root.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []  # whoever prepares it makes the folder, or says why it cannot be made


def _is_there(root: Path, name: str) -> bool:
    return name in _names(root)


def _locks(root: Path, name: str) -> list[Path]:
    prefix = f".{name}.lock."
    found = [n for n in _names(root) if n.startswith(prefix) and n[len(prefix) :].isdecimal()]
    return [root / n for n in sorted(found, key=lambda n: int(n[len(prefix) :]))]


def _pause(
    deadline: float, timeout: float, wanted: Path, check: Callable[[], None], locks: list[Path]
) -> None:
    check()
    if time.monotonic() > deadline:
        holder = f"held by {_read(locks[-1])[0] or 'unknown'}" if locks else "held by nobody"
        msg = (
            f"{wanted} was not prepared within {timeout:g} s (its lock is {holder}); look at the "
            f"log of the rank that prepares it, or allow more time by --data-timeout"
        )
        raise WorkloadError(msg)
    time.sleep(POLL)


def _make(root: Path, name: str, build: Callable[[Path], None], passed_over: list[Path]) -> None:
    """Build and rename; the caller holds the lock."""
    # Whoever held the lock before may have finished in between.
    if _is_there(root, name) or not all(lock.exists() for lock in passed_over):
        return
    if passed_over:
        for leftover in root.glob(f".{name}.tmp-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        for lock in passed_over:
            lock.unlink(missing_ok=True)
    # Not mkdtemp: its mode, 0700, would lock out the colleagues who share the folder.
    temporary = root / f".{name}.tmp-{uuid.uuid4().hex}"
    temporary.mkdir()
    try:
        with _cleanup_on_sigterm():
            build(temporary)
        try:
            temporary.rename(root / name)
        except OSError:
            if not _is_there(root, name):  # else another process was taken for dead and was not
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _acquire(lock: Path) -> bool:
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
def _held(lock: Path, interval: float) -> Iterator[None]:
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


@contextlib.contextmanager
def _cleanup_on_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that nothing half-written stays behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Watch:
    """Tells whether a lock is still touched, by this process's own clock alone."""

    def __init__(self, stale: float) -> None:
        self._stale = stale
        self._seen: tuple[Path, float] | None = None
        self._since = 0.0

    def is_stale(self, lock: Path) -> bool:
        holder, touched = _read(lock)
        if holder is None:
            return False  # just removed: look again
        if _has_died(holder):
            return True
        if (lock, touched) != self._seen:
            self._seen, self._since = (lock, touched), time.monotonic()
        return time.monotonic() - self._since > self._stale


def _read(lock: Path) -> tuple[str | None, float]:
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
