"""Starts the ranks of a workload as plain processes, with the variables of a Slurm step."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 150  # seconds for a whole run


@dataclass(frozen=True)
class Result:
    """How a run ended: per rank the exit code, what it wrote, and after how many seconds."""

    codes: list[int]
    out: list[str]
    err: list[str]
    ended: list[float]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def run_ranks(
    nodes: int,
    tasks: int,
    arguments: Sequence[str],
    *,
    folder: Path,
    environ: Mapping[str, str] | None = None,
    by_node: Sequence[Mapping[str, str]] = (),
    workloads: Path = ROOT / "workloads",
    cwd: Path | None = None,
) -> Result:
    """Run ``python WORKLOADS ARGUMENTS`` on nodes x tasks ranks and wait for all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    common = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "TOOLKIT_"))},
        "TOOLKIT_TARGET": "local",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(nodes * tasks),
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_TASKS_PER_NODE": f"{tasks}(x{nodes})" if nodes > 1 else str(tasks),
        "SLURM_STEP_NODELIST": f"node[1-{nodes}]" if nodes > 1 else "node1",
        **(environ or {}),
    }
    processes = []
    for rank in range(nodes * tasks):
        node, local = divmod(rank, tasks)
        with (
            (folder / f"rank{rank}.out").open("wb") as out,
            (folder / f"rank{rank}.err").open("wb") as err,
        ):
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(workloads), *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    cwd=cwd,
                    env={
                        **common,
                        "SLURM_PROCID": str(rank),
                        "SLURM_LOCALID": str(local),
                        "SLURM_NODEID": str(node),
                        **(by_node[node] if by_node else {}),
                    },
                )
            )
    started, ended = time.monotonic(), [0.0] * len(processes)
    try:
        while not all(ended) and time.monotonic() - started < LIMIT:
            for rank, process in enumerate(processes):
                if not ended[rank] and process.poll() is not None:
                    ended[rank] = time.monotonic() - started
            time.sleep(0.02)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return Result(
        codes=[process.returncode for process in processes],
        out=[(folder / f"rank{rank}.out").read_text() for rank in range(len(processes))],
        err=[(folder / f"rank{rank}.err").read_text() for rank in range(len(processes))],
        ended=ended,
    )


def read_metrics(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The lines of a run's metrics, and what they say in the end: the last value of each key."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    merged: dict[str, Any] = {}
    for line in lines:
        merged.update(line)
    return lines, merged
