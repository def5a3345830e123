"""What a workload reports: JSON lines in the run directory, and the memory of its processes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

INTERVAL = 0.5  # seconds between two lines about steps: enough for a progress display


class Metrics:
    """Appends lines to ``$TOOLKIT_RUN_DIR/metrics.jsonl``; on rank 0 alone, and only in a run.

    The toolkit merges the lines into the ``metrics`` of ``result.json``: the last value of each
    key counts.
    """

    def __init__(self, environ: Mapping[str, str], rank: int) -> None:
        self._file: IO[str] | None = None
        self._last = -INTERVAL
        folder = environ.get("TOOLKIT_RUN_DIR")
        if folder and rank == 0:
            self._file = (Path(folder) / "metrics.jsonl").open("a", buffering=1)

    def write(self, **values: Any) -> None:
        """Write a line now."""
        if self._file:
            self._file.write(json.dumps(values) + "\n")

    def due(self) -> bool:
        """Tell whether it is time for another line about a step."""
        now = time.monotonic()
        if now - self._last < INTERVAL:
            return False
        self._last = now
        return True

    def close(self) -> None:
        """Close the file."""
        if self._file:
            self._file.close()


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
