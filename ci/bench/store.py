"""Many ranks that meet at one of torch's stores, without the ranks; called by ``scale``.

    python3 store.py RANKS LIMIT

A process holds the store as rank 0 does, with LIMIT open files allowed; another opens as many
connections as there are ranks, and each counts itself. Prints ``[ranks that could, CPU seconds of
the store's process, MB that it grew]``. Ends with 78 where so many files may not be opened here.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

ADDRESS = "127.0.0.1"


def memory_mb() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def hold() -> None:
    """Be the store until a line comes."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), hard))
    store = TCPStore(ADDRESS, 0, is_master=True, wait_for_workers=False)
    cpu, memory = time.process_time(), memory_mb()
    print(store.port, flush=True)
    sys.stdin.readline()
    print(json.dumps([time.process_time() - cpu, memory_mb() - memory]), flush=True)
    os._exit(0)


def meet(ranks: int, port: int) -> int:
    """Connect so many times; how often that went well."""
    from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415

    held = []
    try:
        for _ in range(ranks):
            limit = timedelta(seconds=5)
            held.append(TCPStore(ADDRESS, port, wait_for_workers=False, timeout=limit))
            held[-1].add("here", 1)
    except DistError:
        return len(held) - (len(held) > held[0].add("here", 0))
    return len(held)


def main() -> None:
    """Start the store, connect, print."""
    ranks, limit = int(sys.argv[1]), int(sys.argv[2])
    if sys.argv[3:] == ["hold"]:
        hold()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(ranks + 512, limit)
    if hard != resource.RLIM_INFINITY and hard < most:
        print(f"{hard} files may be open here at most (ulimit -Hn)", file=sys.stderr)
        sys.exit(78)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    with subprocess.Popen(
        [sys.executable, __file__, *sys.argv[1:], "hold"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as store:
        assert store.stdout
        met = meet(ranks, int(store.stdout.readline()))
        said, _ = store.communicate("\n", timeout=30)
    print(json.dumps([met, *json.loads(said)]), flush=True)
    os._exit(0)  # closing thousands of connections one by one takes long


if __name__ == "__main__":
    main()
