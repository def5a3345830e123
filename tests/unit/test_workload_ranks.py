"""How ranks fail together and choose devices: ranks are threads that share a store."""

from __future__ import annotations

import os
import threading
import time
from argparse import Namespace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from toolkit.entrypoint import World, resolve
from workloads import datasets
from workloads.common import ranks as module
from workloads.common.errors import WorkloadError
from workloads.common.prepare import Recipe
from workloads.common.ranks import RankError, Ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


def worlds(nodes: int, tasks: int) -> list[World]:
    return [
        resolve(
            {
                "SLURM_JOB_ID": "1",
                "SLURM_STEP_ID": "0",
                "SLURM_STEP_NUM_TASKS": str(nodes * tasks),
                "SLURM_STEP_NUM_NODES": str(nodes),
                "SLURM_STEP_TASKS_PER_NODE": f"{tasks}(x{nodes})",
                "SLURM_STEP_NODELIST": f"node[1-{nodes}]",
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(rank % tasks),
                "SLURM_NODEID": str(rank // tasks),
            }
        )
        for rank in range(nodes * tasks)
    ]


def on_all(call: Callable[[World], Any], nodes: int, tasks: int) -> list[Any]:
    """What ``call`` gives, or raises, for every rank, each in a thread of its own."""
    answers: list[Any] = [None] * (nodes * tasks)

    def be(world: World) -> None:
        try:
            answers[world.rank] = call(world)
        except WorkloadError as error:
            answers[world.rank] = error

    threads = [threading.Thread(target=be, args=(world,)) for world in worlds(nodes, tasks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return answers


def test_all_ranks_get_the_error_of_the_first_that_fails() -> None:
    store = HashStore()

    def call(world: World) -> None:
        error = None
        if world.rank in (2, 3):
            time.sleep(0.2 * (world.rank - 2))
            error = WorkloadError(f"disk {world.rank} is full", 5)
        Ranks(world, torch.device("cpu"), store).agree("data", error, 30)

    answers = on_all(call, 2, 2)
    assert [str(answer) for answer in answers] == ["disk 2 is full"] * 4
    assert {(answer.rank, answer.exit_code) for answer in answers} == {(2, 5)}


def test_nobody_goes_on_before_all_have_come() -> None:
    store = HashStore()
    came: list[int] = []

    def call(world: World) -> int:
        time.sleep(0.3 * (world.rank == 1))
        came.append(world.rank)
        Ranks(world, torch.device("cpu"), store).agree("data", None, 30)
        return len(came)

    assert on_all(call, 1, 3) == [3, 3, 3]


def test_a_rank_that_never_comes_is_not_waited_for_for_ever() -> None:
    store = HashStore()

    def call(world: World) -> None:
        if world.rank != 1:
            Ranks(world, torch.device("cpu"), store).agree("data", None, 0.3)

    first, absent, last = on_all(call, 1, 3)
    assert absent is None
    for error in (first, last):
        assert "2 of 3 ranks came" in str(error)
        assert error.exit_code == 76
        assert not isinstance(error, RankError)


def devices(
    monkeypatch: pytest.MonkeyPatch,
    gpus: Sequence[Sequence[str]],
    nodes: int,
    *,
    wanted: str = "auto",
    target: str = "slurm",
) -> list[Any]:
    """What each rank takes that sees the GPUs with these UUIDs; torch is told, no GPU is here."""
    here = threading.local()
    monkeypatch.setenv("TOOLKIT_TARGET", target)
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(gpus[here.rank]))
    monkeypatch.setattr(
        "torch.cuda.get_device_properties", lambda i: SimpleNamespace(uuid=gpus[here.rank][i])
    )
    store = HashStore()

    def call(world: World) -> str:
        here.rank = world.rank
        return str(module._choose(store, world, wanted))

    return on_all(call, nodes, len(gpus) // nodes)


def test_case_5_1_each_rank_sees_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices(monkeypatch, [["A"], ["B"], ["C"], ["D"]], 1) == ["cuda:0"] * 4


def test_case_5_2_more_local_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for seen in (["A", "B"], ["A"]):
        errors = devices(monkeypatch, [seen] * 4, 1)
        assert all(f"4 local ranks but {len(seen)} GPU" in str(error) for error in errors)
        # On one's own machine the same run goes on without GPUs.
        assert devices(monkeypatch, [seen] * 4, 1, target="local") == ["cpu"] * 4


def test_case_5_4_no_visible_gpu_is_the_cpu_unless_one_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert devices(monkeypatch, [[], []], 1) == ["cpu", "cpu"]
    assert devices(monkeypatch, [["A"], ["A"]], 1, wanted="cpu") == ["cpu", "cpu"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "NoDevFiles")
    for error in devices(monkeypatch, [[], []], 1, wanted="cuda"):
        assert "NoDevFiles" in str(error)


def test_case_5_5_all_ranks_of_a_node_see_all_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    node1, node2 = ["A", "B"], ["C", "D"]
    assert devices(monkeypatch, [node1, node1, node2, node2], 2) == ["cuda:0", "cuda:1"] * 2


def test_ranks_take_the_same_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [["A"], ["B"], [], []]
    for error in devices(monkeypatch, gpus, 2):
        assert "2 of 4 ranks see a GPU and the others do not" in str(error)
    for error in devices(monkeypatch, gpus, 2, wanted="cuda"):
        assert isinstance(error, RankError)
        assert error.rank in (2, 3)
    assert devices(monkeypatch, gpus, 2, target="local") == ["cpu"] * 4


def test_an_error_is_said_first_by_the_rank_that_met_it(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)

    def fail(error: Exception) -> tuple[int, str, float]:
        def main(_world: World) -> None:
            raise error

        started = time.monotonic()
        code = module.run("sage", main)
        return code, capfd.readouterr().err, time.monotonic() - started

    code, said, took = fail(WorkloadError("no such thing"))
    assert (code, said, took < 0.5) == (2, "sage: no such thing\n", True)
    code, said, took = fail(RankError("disk full", 5, 1))
    assert (code, said, took > 0.9) == (5, "sage: rank 1 ended the run: disk full\n", True)
    code, said, _ = fail(torch.distributed.DistNetworkError("reset\nC++ trace"))
    assert (code, said) == (76, "sage: rank 0 lost the other ranks: reset\n")


@pytest.mark.parametrize("fault", [ZeroDivisionError("a bug"), MemoryError("99 TB"), OSError(28)])
def test_whatever_stops_a_writer_stops_all(
    tmp_path: Path, fault: Exception, capfd: pytest.CaptureFixture[str]
) -> None:
    def build(folder: Path) -> None:
        (folder / "half").touch()
        raise fault

    store = HashStore()
    options = Namespace(data_dir=tmp_path, data_timeout=30.0)

    def call(world: World) -> None:
        datasets.load(Ranks(world, torch.device("cpu"), store), Recipe("data", build), options)

    for error in on_all(call, 2, 2):
        assert isinstance(error, RankError)
        assert error.rank in (0, 2)
        assert str(fault.args[0]) in str(error)
    assert ("Traceback" in capfd.readouterr().err) == isinstance(fault, ZeroDivisionError)
    assert list(tmp_path.iterdir()) == []
