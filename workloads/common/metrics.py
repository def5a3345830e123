"""What a workload reports: lines on stdout, JSON lines in the run directory, memory."""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Generic, TypeVar

from toolkit.entrypoint import run_files
from workloads.common.errors import WorkloadError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Self

    from workloads.common.ranks import Ranks

T = TypeVar("T")
LINES = 10.0  # seconds between two lines about a progress
INTERVAL = 0.5  # seconds between two lines about steps: enough for a progress display


class Metrics:
    """Rank 0's voice: prints, and appends to ``$TOOLKIT_RUN_DIR/metrics.jsonl`` where it is set.

    The toolkit merges the lines of that file into the ``metrics`` of ``result.json``: the last
    value of each key counts. On other ranks everything here does nothing.

    Raises:
        WorkloadError: The file cannot be written.
    """

    def __init__(self, environ: Mapping[str, str], rank: int) -> None:
        self._speaks = rank == 0
        self._file: IO[str] | None = None
        self._last = -INTERVAL
        folder = environ.get("TOOLKIT_RUN_DIR")
        if folder and self._speaks:
            try:
                self._file = (Path(folder) / run_files.METRICS).open("a", buffering=1)
            except OSError as error:
                msg = f"the metrics cannot be written (TOOLKIT_RUN_DIR={folder}): {error}"
                raise WorkloadError(msg) from error

    def say(self, text: str) -> None:
        if self._speaks:
            print(text, flush=True)

    def write(self, **values: Any) -> None:
        """Append a line of JSON."""
        if self._file:
            self._file.write(json.dumps(values) + "\n")

    def due(self) -> bool:
        """Tell whether it is time for another line about a step: at most two a second."""
        now = time.monotonic()
        if now - self._last < INTERVAL:
            return False
        self._last = now
        return True

    def close(self) -> None:
        if self._file:
            self._file.close()


class Waiting(Generic[T]):
    """Goes through what comes late, such as batches, and adds up how long it had to wait.

    Attributes:
        seconds: Spent waiting so far. On a GPU that is time in which it had nothing to do, as long
            as every step ends with a value that is read from it (``loss.item()``).
        share: Of the time since the first item was asked for.
    """

    def __init__(self, items: Iterable[T]) -> None:
        self._items = items
        self.seconds = self.share = 0.0

    def __iter__(self) -> Iterator[T]:
        iterator, started = iter(self._items), time.perf_counter()
        while True:
            began = time.perf_counter()
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                now = time.perf_counter()
                self.seconds += now - began
                self.share = self.seconds / max(now - started, 1e-9)
            yield item


class PeakPss:
    """The most memory that all ranks of a node took together whenever it was measured.

    Attributes:
        per_node: MB (10**6 bytes), in the order of the nodes.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.per_node = [0.0] * ranks.world.num_nodes

    def measure(self) -> None:
        """Measure now, on all ranks."""
        world = self._ranks.world
        mine = [0.0] * world.num_nodes
        mine[world.node_rank] = pss_mb()
        now = self._ranks.sum(*mine)
        self.per_node = [round(max(a, b), 1) for a, b in zip(self.per_node, now, strict=True)]


def pss_mb(process: int | str = "self") -> float:
    """Return a process's share of the memory in use, in MB (10**6 bytes); 0 where unknown.

    The resident size counts a shared page in every process. The proportional one (PSS) divides it
    among them, so the sum over the processes of a node is what they really take.
    Source: proc_pid_smaps(5).
    """
    try:
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    # That of a process which is just ending is empty.
    line = next((line for line in text.splitlines() if line.startswith("Pss:")), "Pss: 0 kB")
    return int(line.split()[1]) * 1024 / 1e6


def give_back() -> None:
    """Give memory that was freed, and that the allocator keeps for later, back to the machine.

    After the steps of an epoch that is a third of what a rank seems to take. Where the C library
    has no such call (it is glibc's), nothing happens.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


class Progress:
    """Shows on stderr how far something has come: a bar on a terminal, else a line now and then.

    Args:
        what: What it is.
        total: How many pieces it has.
        before: How many of them an earlier run has made.
    """

    def __init__(self, what: str, total: int, before: int = 0) -> None:
        self._what, self._total, self._before = what, total, before
        self._bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm  # type: ignore[import-untyped]  # noqa: PLC0415 - PyG's own

            self._bar = tqdm(desc=what, total=total, initial=before, leave=False)
        elif before:
            self._print(f"{what}: goes on where it stopped, at {before} of {total} pieces")
        self._started = self._last = time.monotonic()

    def reached(self, done: int) -> None:
        """Show that so many pieces are made, by whomever."""
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
            return
        now = time.monotonic()
        if now - self._last < LINES:
            return
        self._last = now
        text = f"{self._what}: {done} of {self._total} pieces"
        if made := done - self._before:
            rest = (now - self._started) / made * (self._total - done)
            text += f", {rest:.0f} s to go"
        self._print(text)

    def _print(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
