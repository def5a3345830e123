"""What a workload reports: lines on stdout, JSON lines in the run directory, memory."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Generic, TypeVar

from workloads.common.errors import WorkloadError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from workloads.common.ranks import Ranks

T = TypeVar("T")
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
                self._file = (Path(folder) / "metrics.jsonl").open("a", buffering=1)
            except OSError as error:
                msg = f"the metrics cannot be written (TOOLKIT_RUN_DIR={folder}): {error}"
                raise WorkloadError(msg) from error

    def say(self, text: str) -> None:
        """Print a line."""
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
        """Close the file."""
        if self._file:
            self._file.close()


class Waiting(Generic[T]):
    """Goes through what comes late, such as batches, and adds up how long it had to wait.

    Attributes:
        seconds: Spent waiting so far. On a GPU that is time in which it had nothing to do, as long
            as every step ends with a value that is read from it (``loss.item()``).
    """

    def __init__(self, items: Iterable[T]) -> None:
        self._items = items
        self.seconds = 0.0

    def __iter__(self) -> Iterator[T]:
        iterator = iter(self._items)
        while True:
            began = time.perf_counter()
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                self.seconds += time.perf_counter() - began
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


def pss_mb() -> float:
    """Return this process's share of the memory in use, in MB (10**6 bytes); 0 where unknown.

    The resident size counts a shared page in every process. The proportional one (PSS) divides it
    among them, so the sum over the processes of a node is what they really take.
    Source: proc_pid_smaps(5).
    """
    try:
        text = Path("/proc/self/smaps_rollup").read_text()
    except OSError:
        return 0.0
    line = next(line for line in text.splitlines() if line.startswith("Pss:"))
    return int(line.split()[1]) * 1024 / 1e6
