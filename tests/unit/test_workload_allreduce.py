"""``workloads.allreduce``: what it measures, how it judges, and that it sees wrong values."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore  # type: ignore[attr-defined]

from tests.unit.workload_ranks import read_metrics, run_ranks
from toolkit.entrypoint import resolve
from workloads import allreduce
from workloads.allreduce import Exchange, Row, Scope, bus_factor, make_row, scopes, verdict
from workloads.common.errors import WorkloadError
from workloads.common.ranks import Ranks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.mark.parametrize(
    ("node_of", "expected"),
    [
        ([0, 0], [Scope("node", ((0, 1),))]),
        ([0, 1, 2], [Scope("nodes", ((0, 1, 2),))]),
        (
            [0, 0, 1, 1],
            [
                Scope("node", ((0, 1), (2, 3))),
                Scope("nodes", ((0, 2),)),
                Scope("all", ((0, 1, 2, 3),)),
            ],
        ),
        # A node with a single rank, and ranks that a launcher laid out in a cycle.
        (
            [0, 1, 2, 0, 1],
            [
                Scope("node", ((0, 3), (1, 4))),
                Scope("nodes", ((0, 1, 2),)),
                Scope("all", ((0, 1, 2, 3, 4),)),
            ],
        ),
    ],
)
def test_who_is_measured_with_whom(node_of: list[int], expected: list[Scope]) -> None:
    assert scopes(node_of) == expected


@given(st.lists(st.integers(0, 4), min_size=2, max_size=12))
def test_every_rank_makes_a_group_for_the_same_scopes(node_of: list[int]) -> None:
    # NCCL makes a group by splitting that of all ranks, and waits until each of them does so.
    found = scopes(node_of)
    every = [allreduce.joined(rank, found, len(node_of)) for rank in range(len(node_of))]
    for scope in found:
        made = {one[scope.name] for one in every}
        if made == {None}:  # the group of all is there already
            assert scope.groups == (tuple(range(len(node_of))),)
            continue
        assert set(scope.groups) <= made
        assert sorted(rank for group in made for rank in group or ()) == list(range(len(node_of)))
    assert all(one.keys() == {scope.name for scope in found} for one in every)


def test_one_rank_a_node_needs_no_group_but_that_of_all() -> None:
    assert allreduce.joined(1, scopes([0, 1]), 2) == {"nodes": None}


@pytest.mark.parametrize(
    ("collective", "ranks", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 8, 1.75),
        ("all_gather", 2, 0.5),
        ("all_gather", 8, 0.875),
        ("broadcast", 2, 1.0),
        ("broadcast", 8, 1.0),
    ],
)
def test_bus_bandwidth_is_that_of_nccl_tests(collective: str, ranks: int, factor: float) -> None:
    assert bus_factor(collective, ranks) == factor


def test_the_slowest_rank_of_the_slowest_node_counts() -> None:
    scope = Scope("node", ((0, 1), (2, 3)))
    row = make_row("all_reduce", scope, 4_000_000, [0.001, 0.002, 0.004, 0.003])
    assert (row.slowest, row.latency_us, row.ranks) == (2, 4000, 2)
    assert row.algorithm_gb_s == pytest.approx(1)
    # Nobody else's time: rank 3 is alone on its node and takes no part.
    assert make_row("broadcast", Scope("node", ((0, 1),)), 400, [1e-3, 1e-3, 9, 9]).slowest == 0
    # An all-gather's message is what comes together, and each rank gives a number at least.
    assert make_row("all_gather", Scope("all", ((0, 1, 2),)), 4, [1, 1, 1]).bytes == 12


def rows() -> list[Row]:
    def row(collective: str, scope: str, size: int, bus: float) -> Row:
        return Row(collective, scope, 4, size, 1.0, bus, bus, 0)

    return [
        row("all_reduce", "node", 1 << 20, 90),
        row("all_reduce", "node", 1 << 26, 100),
        row("all_reduce", "nodes", 1 << 26, 9),
        row("all_reduce", "all", 1 << 20, 4),
        row("all_reduce", "all", 1 << 26, 10),
        row("all_gather", "all", 1 << 26, 50),
    ]


def test_the_verdict_is_on_the_best_all_reduce_over_all_ranks() -> None:
    assert verdict(rows(), None, "gloo") == (rows()[4], None)
    assert verdict(rows(), 10, "gloo") == (rows()[4], None)
    best, complaint = verdict(rows(), 12.5, "nccl")
    assert best == rows()[4]
    assert complaint is not None
    for text in ("10 GB/s", "at 64M", "--min-bandwidth expects 12.5", "node 100, nodes 9"):
        assert text in complaint
    # Advice that helps with this backend and no other.
    assert "NCCL_SOCKET_IFNAME" in complaint
    assert "GLOO_SOCKET_IFNAME" in (verdict(rows(), 12.5, "gloo")[1] or "")


def test_what_was_expected_is_said_beside_what_was_found() -> None:
    two = (["mlx5_0", "mlx5_1"], 50.0)
    assert re.fullmatch(
        r"30 or more \(--min-bandwidth\): ok; up to 50, the rate of \S+'s fastest links"
        r" \(mlx5_0, mlx5_1\): 80% of it",
        allreduce.expectation(40, two, 30),
    )
    assert "41 or more (--min-bandwidth): FAILED" in allreduce.expectation(40, None, 41)
    assert "fastest link (eth0)" in allreduce.expectation(1, (["eth0"], 3.125), None)
    assert "--min-bandwidth gives a verdict" in allreduce.expectation(1, None, None)


def test_the_fastest_links_with_hardware_behind_them(tmp_path: Path) -> None:
    def write(name: str, text: str, adapter: str | None, state: str = "") -> None:
        file = tmp_path / name
        file.parent.mkdir(parents=True)
        file.write_text(text)
        if state:
            file.with_name("state").write_text(state)
        if adapter:
            (tmp_path / adapter).mkdir(exist_ok=True)
            device = file.parents[2] if "ports" in file.parts else file.parent
            (device / "device").symlink_to(tmp_path / adapter)

    assert allreduce.fastest_links(tmp_path) is None
    write("net/lo/speed", "", None)
    write("net/docker0/speed", "400000\n", None)
    write("net/eth1/speed", "-1\n", "pci1")
    assert allreduce.fastest_links(tmp_path) is None
    write("net/eth0/speed", "25000\n", "pci2")
    assert allreduce.fastest_links(tmp_path) == (["eth0"], 3.125)
    write("infiniband/mlx5_9/ports/1/rate", "400 Gb/sec (4X NDR)\n", "pci9", "1: DOWN\n")
    write("infiniband/mlx5_0/ports/1/rate", "200 Gb/sec (4X HDR)\n", "pci3", "4: ACTIVE\n")
    assert allreduce.fastest_links(tmp_path) == (["mlx5_0"], 25)
    # Two equal adapters add up; one with two faces (RDMA and Ethernet) counts once.
    write("infiniband/mlx5_1/ports/1/rate", "200 Gb/sec (2X NDR)\n", "pci4", "4: ACTIVE\n")
    write("net/eth4/speed", "200000\n", "pci4")
    assert allreduce.fastest_links(tmp_path) == (["mlx5_0", "mlx5_1"], 50)


def test_sizes_are_read_and_shown_in_powers_of_1024() -> None:
    sizes = allreduce.byte_counts("4,1k,16M, 2G")
    assert sizes == (4, 1024, 16 << 20, 2 << 30)
    assert [allreduce.show_bytes(size) for size in (*sizes, 1025)] == [
        *("4", "1K", "16M", "2G", "1025")
    ]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--sizes", "3"], "'3' is not a size"),
        (["--sizes", "1K,,1M"], "'' is not a size"),
        (["--sizes", "1T"], "'1T' is not a size"),
        (["--sizes", "65G"], "'65G' is not a size"),
        (["--sizes", "1.5M"], "'1.5M' is not a size"),
        (["--sizes", "-4"], "--sizes"),
        (["--min-bandwidth", "0"], "'0' is not a number above 0"),
        (["--min-bandwidth", "fast"], "'fast' is not a number above 0"),
        (["--epochs", "1"], "--epochs"),
    ],
)
def test_wrong_options(arguments: list[str], text: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        allreduce.parse(arguments)
    assert caught.value.exit_code == 2
    assert text in str(caught.value)


def test_two_nodes_of_two_ranks(tmp_path: Path) -> None:
    result = run_ranks(
        *(2, 2),
        ["allreduce", "--sizes", "4,256K", "--min-bandwidth", "0.000001"],
        folder=tmp_path,
        environ={"TOOLKIT_RUN_DIR": str(tmp_path)},
    )
    assert result.codes == [0] * 4, result.err
    assert "every value received was right" in result.out[0]
    assert result.out[1:] == [""] * 3
    lines, metrics = read_metrics(tmp_path)
    measured = metrics["measurements"]
    # What was measured is kept as it comes: a run that is cut short has told what it found.
    assert [line["measurements"] for line in lines[:-1]] == [
        measured[:end] for end in range(2, len(measured) + 1, 2)
    ]
    assert "expected: 1e-06 or more (--min-bandwidth): ok" in result.out[0]
    assert [(row["collective"], row["scope"], row["ranks"], row["bytes"]) for row in measured] == [
        (collective, scope, ranks, max(size, 4 * ranks) if collective == "all_gather" else size)
        for scope, ranks in (("node", 2), ("nodes", 2), ("all", 4))
        for collective in ("all_reduce", "all_gather", "broadcast")
        for size in (4, 256 << 10)
    ]
    for row in measured:
        seconds = row["latency_us"] / 1e6
        assert row["algorithm_gb_s"] == pytest.approx(row["bytes"] / seconds / 1e9, rel=1e-2)
    assert metrics["bus_gb_s"] == max(row["bus_gb_s"] for row in measured[12:14])
    assert metrics["latency_us"] == measured[12]["latency_us"]
    assert (metrics["world_size"], metrics["backend"], metrics["device"]) == (4, "gloo", "cpu")


def test_too_slow_ends_all_ranks_with_one_message(tmp_path: Path) -> None:
    result = run_ranks(
        *(1, 2),
        ["allreduce", "--sizes", "4K", "--min-bandwidth", "1e6"],
        folder=tmp_path,
        environ={"TOOLKIT_RUN_DIR": str(tmp_path)},
    )
    assert result.codes == [1, 1]
    assert re.fullmatch(
        r"allreduce: too slow: .* --min-bandwidth expects 1e\+06.*\n", result.err[0]
    )
    assert result.err[1] == ""
    # What was found is kept all the same.
    assert read_metrics(tmp_path)[1]["bus_gb_s"] > 0


def test_one_rank_alone_is_told_to_bring_another(tmp_path: Path) -> None:
    result = run_ranks(1, 1, ["allreduce"], folder=tmp_path)
    assert result.codes == [2]
    assert "start 2 or more" in result.err[0]


@pytest.fixture
def alone() -> Iterator[Ranks]:
    """A process group of this process."""
    store = HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield Ranks(resolve({}), torch.device("cpu"), store)
    dist.destroy_process_group()


@pytest.mark.parametrize("collective", allreduce.COLLECTIVES)
def test_a_wrong_value_is_seen(
    alone: Ranks, collective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert dist.group.WORLD
    scope, groups = Scope("all", ((0,),)), {"all": dist.group.WORLD}
    assert allreduce.measure(alone, collective, scope, 4096, groups).bytes == 4096
    right = Exchange.call

    def flip(self: Exchange) -> None:
        right(self)
        received = self.every if len(self.every) else self.mine
        received[77] += 1

    monkeypatch.setattr(Exchange, "call", flip)
    with pytest.raises(WorkloadError) as caught:
        allreduce.measure(alone, collective, scope, 4096, groups)
    assert f"rank 0 received 1 wrong values in {collective} of 4K" in str(caught.value)
    assert caught.value.exit_code == 1
