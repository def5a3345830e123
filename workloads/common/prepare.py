"""Make a folder once, however many processes, nodes and jobs want it at the same time.

One process (local rank 0 of each node) calls ``prepare``; the rest call ``wait_for``. A folder is
complete when its name is there: it is written under another name and renamed. Who may write is
settled by a lock file. A stale lock is passed over by making the lock of the next generation, so
that of many that wait exactly one takes over.

What takes long is cut into pieces: whoever waits takes one that nobody else has taken, on all nodes
that see the folder. Pieces that are done stay when all are killed, and the next run goes on there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from workloads.common.errors import WorkloadError
from workloads.common.lock import BEATS, STALE, Watch, acquire, held, holder
from workloads.common.metrics import Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import TypeAlias

    Pieces: TypeAlias = dict[str, Callable[[], None]]

POLL = 0.1  # seconds between two looks at the folder
DONE = ".pieces"  # in a folder whose pieces are being made: who makes which, and which are done


@dataclass(frozen=True)
class Recipe:
    """What fills a folder.

    Attributes:
        name: The folder to make; it must stand for everything that decides its content.
        build: Fills the empty folder that it is given; where there are pieces, it makes the folder
            ready for them, and may find there what an earlier one has left that was killed.
        pieces: Gives what remains to be done in the folder after ``build``, by name. A piece may be
            done by any process that sees the folder, beside the others, and twice: what it writes
            is always the same.
        finish: Called once all pieces are done; it too may be called again.
    """

    name: str
    build: Callable[[Path], None]
    pieces: Callable[[Path], Pieces] | None = None
    finish: Callable[[Path], None] = lambda _: None


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
    recipe: Recipe,
    *,
    timeout: float,
    check: Callable[[], None] = lambda: None,
    stale: float = STALE,
) -> Path:
    """Return ``root/name``, made by the recipe in this process or by another one meanwhile.

    Args:
        root: A folder, made where it is missing; node-local or shared.
        recipe: What to make.
        timeout: Seconds to wait for another process that is making it; no limit on making it.
        check: Called while waiting; raises to end the wait.
        stale: Seconds after which a lock that nobody touches is passed over; the same for all.

    Raises:
        WorkloadError: It cannot be written, or another process did not finish it in time.
    """
    watch, crew = Watch(stale), _Crew(root, recipe, stale)
    wait = _Wait(root / recipe.name, timeout, check)
    with _told(root / recipe.name):
        root.mkdir(parents=True, exist_ok=True)
        while not _is_there(root, recipe.name):
            locks = _locks(root, recipe.name)
            if not locks or watch.is_stale(locks[-1]):
                generation = int(locks[-1].suffix[1:]) + 1 if locks else 0
                lock = root / f".{recipe.name}.lock.{generation}"
                if acquire(lock):
                    with held(lock, stale / BEATS):
                        _make(root, recipe, crew, passed_over=locks)
                    continue
            wait.help_or_pause(crew, locks)
    return root / recipe.name


def wait_for(
    root: Path,
    recipe: Recipe,
    *,
    timeout: float,
    check: Callable[[], None] = lambda: None,
    stale: float = STALE,
) -> Path:
    """Return ``root/name`` once it is there, and help with its pieces meanwhile.

    Raises:
        WorkloadError: It is not there after ``timeout`` seconds, or ``root`` cannot be used.
    """
    crew, wait = _Crew(root, recipe, stale), _Wait(root / recipe.name, timeout, check)
    with _told(root / recipe.name):
        while not _is_there(root, recipe.name):
            wait.help_or_pause(crew, _locks(root, recipe.name))
    return root / recipe.name


class _Crew:
    """One of those who make the pieces of a folder."""

    def __init__(self, root: Path, recipe: Recipe, stale: float) -> None:
        self.folder, self._recipe = root / f".{recipe.name}.part", recipe
        self._watch, self._beat = Watch(stale), stale / BEATS
        self._pieces: Pieces | None = None

    @property
    def is_ready(self) -> bool:
        """Whether there are pieces to make now."""
        return self._recipe.pieces is not None and (self.folder / DONE).is_dir()

    @property
    def pieces(self) -> Pieces:
        """All of them, made or not; the folder is ready."""
        if self._pieces is None:
            assert self._recipe.pieces  # as is_ready says
            self._pieces = self._recipe.pieces(self.folder)
        return self._pieces

    def done(self) -> int:
        """How many pieces are made."""
        return sum(name.endswith(".done") for name in _names(self.folder / DONE))

    def make_one(self) -> bool:
        """Make a piece that nobody is making; False where there is none."""
        state, names = self.folder / DONE, set(_names(self.folder / DONE))
        for name, make in self.pieces.items():
            claim = state / f"{name}.claim"
            if f"{name}.done" in names or (claim.name in names and not self._watch.is_stale(claim)):
                continue
            if claim.name in names:
                # Where its holder is alive after all, the piece is made twice, which is no harm.
                claim.unlink(missing_ok=True)
            if not acquire(claim):
                continue
            with held(claim, self._beat):
                make()
                (state / f"{name}.done").touch()
            return True
        return False


class _Wait:
    """Waits for a folder that another process makes."""

    def __init__(self, wanted: Path, timeout: float, check: Callable[[], None]) -> None:
        self._wanted, self._timeout, self._check = wanted, timeout, check
        self._deadline = time.monotonic() + timeout

    def help_or_pause(self, crew: _Crew, locks: list[Path]) -> None:
        """Make a piece of it, or wait a moment; raises once it has taken too long."""
        self._check()
        # The folder may get its name while this process still looks for what there is to do.
        with contextlib.suppress(FileNotFoundError):
            if crew.is_ready and crew.make_one():
                self._deadline = time.monotonic() + self._timeout
                return
        if time.monotonic() > self._deadline:
            who = f"held by {holder(locks[-1])}" if locks else "held by nobody"
            msg = (
                f"{self._wanted} was not prepared within {self._timeout:g} s (its lock is "
                f"{who}); look at the log of the rank that prepares it, or allow more time by "
                f"--data-timeout"
            )
            raise WorkloadError(msg)
        time.sleep(POLL)


@contextlib.contextmanager
def _told(folder: Path) -> Iterator[None]:
    """Say what the system refused."""
    try:
        yield
    except MemoryError as error:
        msg = f"not enough memory to prepare the data set {folder.name}: {error}"
        raise WorkloadError(msg) from error
    except OSError as error:
        msg = (
            f"cannot prepare the data set in {folder}: {error}; "
            f"choose a folder that can be written by --data-dir or TOOLKIT_DATA"
        )
        raise WorkloadError(msg) from error


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


def _make(root: Path, recipe: Recipe, crew: _Crew, passed_over: list[Path]) -> None:
    """Build and rename; the caller holds the lock."""
    # Whoever held the lock before may have finished in between.
    if _is_there(root, recipe.name) or not all(lock.exists() for lock in passed_over):
        return
    if passed_over:
        for leftover in root.glob(f".{recipe.name}.tmp-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        for lock in passed_over:
            lock.unlink(missing_ok=True)
    with _cleanup_on_sigterm():
        if not recipe.pieces:
            _make_at_once(root, recipe)
            return
        try:
            _make_by_pieces(root, recipe, crew)
        except FileNotFoundError:
            # This process was taken for dead and was not, and another one has finished.
            if not _is_there(root, recipe.name):
                raise


def _make_at_once(root: Path, recipe: Recipe) -> None:
    # Not mkdtemp: its mode, 0700, would lock out the colleagues who share the folder.
    temporary = root / f".{recipe.name}.tmp-{uuid.uuid4().hex}"
    temporary.mkdir()
    try:
        recipe.build(temporary)
        _name(temporary, root / recipe.name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _make_by_pieces(root: Path, recipe: Recipe, crew: _Crew) -> None:
    crew.folder.mkdir(exist_ok=True)
    if not crew.is_ready:
        recipe.build(crew.folder)
        (crew.folder / DONE).mkdir()
    total = len(crew.pieces)
    with Progress(f"preparing {recipe.name}", total, crew.done()) as progress:
        while (done := crew.done()) < total:
            progress.reached(done)
            if not crew.make_one():
                time.sleep(POLL)
        progress.reached(total)
    recipe.finish(crew.folder)
    _name(crew.folder, root / recipe.name)
    shutil.rmtree(root / recipe.name / DONE, ignore_errors=True)


def _name(made: Path, name: Path) -> None:
    """Give the folder its name, unless another process was taken for dead, was not, and has."""
    try:
        made.rename(name)
    except OSError:
        if not _is_there(name.parent, name.name):
            raise


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
