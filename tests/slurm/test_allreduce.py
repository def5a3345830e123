"""``toolkit run allreduce`` between the nodes of a real cluster: what a user gets to know."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.cli import shared_folder, toolkit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ALLREDUCE = ("--on", "slurm", "--nodes", "2", "--ntasks-per-node", "2", "--json", "allreduce")


@pytest.fixture
def shared() -> Iterator[Path]:
    with shared_folder() as folder:
        yield folder


def test_it_is_measured_within_and_between_the_nodes(shared: Path) -> None:
    ran = toolkit(
        *(shared, "run", *ALLREDUCE, "--sizes", "4K,1M", "--min-bandwidth", "0.000001"),
        OMP_NUM_THREADS="1",
    )
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    assert (result["hosts"], result["world_size"]) == (["node01", "node02"], 4)
    metrics = result["metrics"]
    rows = metrics["measurements"]
    assert [(row["scope"], row["ranks"], row["collective"], row["bytes"]) for row in rows] == [
        (scope, ranks, collective, size)
        for scope, ranks in (("node", 2), ("nodes", 2), ("all", 4))
        for collective in ("all_reduce", "all_gather", "broadcast")
        for size in (4096, 1 << 20)
    ]
    assert all(row["latency_us"] > 0 and row["bus_gb_s"] > 0 for row in rows)
    assert metrics["bus_gb_s"] == max(row["bus_gb_s"] for row in rows[12:14])
    said = (shared / "runs/latest/logs/rank-0.log").read_text()
    assert "world size 4 on 2 node(s), cpu, gloo" in said
    assert "every value received was right" in said
    assert "expected: 1e-06 or more (--min-bandwidth): ok" in said


def test_too_slow_is_1_and_says_what_was_found(shared: Path) -> None:
    ran = toolkit(
        *(shared, "run", *ALLREDUCE, "--sizes", "64K", "--min-bandwidth", "1000000"),
        OMP_NUM_THREADS="1",
    )
    assert ran.returncode == 1, ran.stderr
    result = json.loads(ran.stdout)
    assert result["exit_code"] == 1
    assert (result["failure"]["origin"], result["failure"]["rank"]) == ("workload", 0)
    assert result["metrics"]["min_bandwidth_gb_s"] == 1e6
    assert 0 < result["metrics"]["bus_gb_s"] < 1e6
    for text in ("too slow: all_reduce reaches", "over 4 ranks at 64K", "expects 1e+06"):
        assert text in ran.stderr
