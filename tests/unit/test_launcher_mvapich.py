"""Ranks of MVAPICH's mpirun_rsh: case 4-r1, and what else it may leave."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.entrypoint import EntrypointError, resolve
from toolkit.entrypoint.launchers import is_left_behind


def mv2(size: int, rank: int, local_rank: int, local_size: int) -> dict[str, str]:
    """What mpirun_rsh sets for a rank, as its users report it."""
    return {
        "MV2_COMM_WORLD_SIZE": str(size),
        "MV2_COMM_WORLD_RANK": str(rank),
        "MV2_COMM_WORLD_LOCAL_RANK": str(local_rank),
        "MV2_COMM_WORLD_LOCAL_SIZE": str(local_size),
    }


def test_case_4_r1_eight_ranks_are_one_world() -> None:
    world = resolve({**mv2(8, 3, 1, 2), "MASTER_ADDR": "node01"})
    assert (world.world_size, world.rank, world.local_rank) == (8, 3, 1)
    assert (world.local_world_size, world.node_rank, world.num_nodes) == (2, 1, 4)
    assert (world.launcher, world.master_addr, world.warnings) == ("mvapich", "node01", ())


@given(st.integers(1, 16), st.integers(1, 8))
def test_case_4_r1_every_rank_knows_its_place(nodes: int, each: int) -> None:
    worlds = [
        resolve({**mv2(nodes * each, rank, rank % each, each), "MASTER_ADDR": "node01"})
        for rank in range(nodes * each)
    ]
    assert [world.rank for world in worlds] == list(range(nodes * each))
    assert {world.world_size for world in worlds} == {nodes * each}
    assert [world.node_rank for world in worlds] == [rank // each for rank in range(nodes * each)]


@pytest.mark.parametrize("missing", ["SIZE", "LOCAL_RANK", "LOCAL_SIZE"])
def test_half_a_set_is_named(missing: str) -> None:
    environ = mv2(4, 1, 1, 2)
    del environ[f"MV2_COMM_WORLD_{missing}"]
    with pytest.raises(EntrypointError, match=f"MV2_COMM_WORLD_{missing}"):
        resolve(environ)


def test_several_nodes_need_to_know_where_to_meet() -> None:
    with pytest.raises(EntrypointError, match="MASTER_ADDR"):
        resolve(mv2(4, 1, 1, 2))


def test_it_stands_above_the_step_that_it_was_started_in() -> None:
    step = {
        "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_NODELIST": "node01",
    }  # fmt: skip
    world = resolve({**step, **mv2(4, 3, 1, 2), "MASTER_ADDR": "node01"})
    assert (world.launcher, world.rank, world.world_size) == ("mvapich", 3, 4)


def test_nothing_of_it_reaches_another_job_but_what_the_user_set_for_mvapich_does() -> None:
    assert all(map(is_left_behind, mv2(1, 0, 0, 1)))
    assert not is_left_behind("MV2_USE_CUDA")
