"""Ranks from each launcher: what it gives, what it lacks, and what does not add up."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.entrypoint import EntrypointError, World, resolve
from toolkit.entrypoint.launchers import names
from toolkit.entrypoint.launchers.slurm import block, cyclic


def check(world: World, **expected: object) -> None:
    assert {name: getattr(world, name) for name in expected} == expected


def refused(environ: dict[str, str], *parts: str) -> EntrypointError:
    """Assert that ``environ`` is an error whose message has all ``parts``."""
    with pytest.raises(EntrypointError) as caught:
        resolve(environ)
    assert caught.value.exit_code == 71
    for part in parts:
        assert part in str(caught.value)
    return caught.value


def step(**changes: str | None) -> dict[str, str]:
    """Rank 5 of a step of two nodes of four tasks, with changes; None takes a variable away."""
    environ: dict[str, str | None] = {
        "SLURM_JOB_ID": "501",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
        "SLURM_STEP_NODELIST": "node[01-02]",
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "1",
        **changes,
    }
    return {name: value for name, value in environ.items() if value is not None}


BATCH = {
    "SLURM_JOB_ID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_NPROCS": "8",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_JOB_NODELIST": "node[01-02]",
    "SLURM_NNODES": "2",
}


class TestSlurm:
    def test_a_whole_step(self) -> None:
        world = resolve(step())
        check(world, world_size=8, rank=5, local_rank=1, local_world_size=4, launcher="slurm")
        check(world, node_rank=1, num_nodes=2, master_addr="node01", warnings=())
        assert world.sources["world_size"] == "SLURM_STEP_NUM_TASKS"
        assert world.sources["master_addr"] == "SLURM_STEP_NODELIST"

    def test_case_2_5_a_step_smaller_than_its_job(self) -> None:
        world = resolve(
            {
                "SLURM_JOB_ID": "15",
                "SLURM_JOB_NODELIST": "node[01-02]",
                "SLURM_NODELIST": "node[01-02]",
                "SLURM_JOB_NUM_NODES": "2",
                "SLURM_NNODES": "1",
                "SLURM_STEP_ID": "0",
                "SLURM_STEP_NODELIST": "node02",
                "SLURM_STEP_NUM_NODES": "1",
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_PROCID": "1",
                "SLURM_LOCALID": "1",
                "SLURM_NTASKS_PER_NODE": "4",
            }
        )
        check(world, world_size=2, rank=1, local_world_size=2, num_nodes=1)
        check(world, master_addr="127.0.0.1")

    def test_case_4_1_a_step_with_only_the_job_values(self) -> None:
        world = resolve(
            {
                "SLURM_JOB_ID": "501",
                "SLURM_STEP_ID": "0",
                "SLURM_NNODES": "2",
                "SLURM_NTASKS_PER_NODE": "4",
                "SLURM_TASKS_PER_NODE": "4(x2)",
                "SLURM_PROCID": "5",
                "SLURM_LOCALID": "1",
                "SLURM_NODEID": "1",
                "SLURM_JOB_NODELIST": "node[01-02]",
            }
        )
        check(world, world_size=8, rank=5, local_rank=1, local_world_size=4)
        check(world, master_addr="node01", node_rank=1)

    def test_case_4_1_without_any_layout_but_tasks_per_node(self) -> None:
        environ = step(
            SLURM_STEP_NUM_TASKS=None,
            SLURM_STEP_TASKS_PER_NODE=None,
            SLURM_STEP_NUM_NODES=None,
            SLURM_NTASKS_PER_NODE="4",
        )
        check(resolve({**environ, "SLURM_NNODES": "2"}), world_size=8, local_world_size=4)

    def test_case_4_2_uneven_nodes(self) -> None:
        environ = {
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": "8",
            "SLURM_NTASKS": "8",
            "SLURM_STEP_TASKS_PER_NODE": "7,1",
            "SLURM_STEP_NODELIST": "node[01-02]",
            "SLURM_PROCID": "7",
            "SLURM_LOCALID": "0",
            "SLURM_NODEID": "1",
        }
        check(resolve(environ), world_size=8, rank=7, local_rank=0, local_world_size=1)
        environ.update(SLURM_PROCID="3", SLURM_LOCALID="3", SLURM_NODEID="0")
        check(resolve(environ), rank=3, local_rank=3, local_world_size=7, node_rank=0)

    def test_case_4_3_stale_job_values_in_a_smaller_step(self) -> None:
        world = resolve(
            {
                "SLURM_JOB_NUM_NODES": "2",
                "SLURM_JOB_NODELIST": "node[01-02]",
                "SLURM_NTASKS": "8",
                "SLURM_NTASKS_PER_NODE": "4",
                "SLURM_NNODES": "1",
                "SLURM_STEP_ID": "0",
                "SLURM_STEP_NODELIST": "node01",
                "SLURM_STEP_NUM_NODES": "1",
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_STEP_TASKS_PER_NODE": "2",
                "SLURM_PROCID": "1",
                "SLURM_LOCALID": "1",
            }
        )
        check(world, world_size=2, rank=1, local_world_size=2, master_addr="127.0.0.1")

    @pytest.mark.parametrize(
        ("changes", "node", "local"),
        [
            ({"SLURM_NODEID": None}, 1, 1),
            ({"SLURM_NODEID": None, "SLURMD_NODENAME": "node02"}, 1, 1),
            # Cyclic: 0 2 4 6 on the first node, 1 3 5 7 on the second.
            ({"SLURM_NODEID": None, "SLURM_LOCALID": "2"}, 1, 2),
            ({"SLURM_LOCALID": None, "SLURM_PROCID": "3", "SLURM_NODEID": "1"}, 1, 1),
            ({"SLURM_LOCALID": None, "SLURM_DISTRIBUTION": "block"}, 1, 1),
            ({"SLURM_LOCALID": None, "SLURM_DISTRIBUTION": "cyclic:block"}, 1, 2),
            ({"SLURM_LOCALID": None, "SLURM_NODEID": None, "SLURM_DISTRIBUTION": "cyclic"}, 1, 2),
        ],
    )
    def test_what_a_step_lacks_follows_from_its_layout(
        self, changes: dict[str, str | None], node: int, local: int
    ) -> None:
        world = resolve(step(**changes))
        check(world, node_rank=node, local_rank=local, local_world_size=4, warnings=())

    def test_uneven_cyclic_layout(self) -> None:
        # 3, 1 and 2 tasks dealt round: 0 3 5 | 1 | 2 4.
        layout = [3, 1, 2]
        assert [cyclic(rank, layout) for rank in range(6)] == [
            (0, 0),
            (1, 0),
            (2, 0),
            (0, 1),
            (2, 1),
            (0, 2),
        ]
        assert [block(rank, layout)[0] for rank in range(6)] == [0, 0, 0, 1, 2, 2]

    @pytest.mark.parametrize("known", [{}, {"SLURM_NODEID": "1"}, {"SLURMD_NODENAME": "node02"}])
    def test_the_block_distribution_is_assumed_with_a_warning(self, known: dict[str, str]) -> None:
        world = resolve(step(**{"SLURM_LOCALID": None, "SLURM_NODEID": None, **known}))
        check(world, node_rank=1, local_rank=1)
        assert "block distribution" in world.warnings[0]

    def test_one_task_per_node_needs_no_layout(self) -> None:
        environ = step(
            SLURM_STEP_NUM_TASKS="2",
            SLURM_STEP_TASKS_PER_NODE=None,
            SLURM_PROCID="1",
            SLURM_LOCALID=None,
            SLURM_NODEID=None,
        )
        check(resolve(environ), node_rank=1, local_rank=0, local_world_size=1, warnings=())

    @pytest.mark.parametrize(
        ("changes", "parts"),
        [
            ({"SLURM_PROCID": "8"}, ["8", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"]),
            ({"SLURM_PROCID": None}, ["SLURM_PROCID is not set"]),
            ({"SLURM_LOCALID": "4"}, ["SLURM_LOCALID", "4", "SLURM_STEP_TASKS_PER_NODE"]),
            ({"SLURM_NODEID": "2"}, ["SLURM_NODEID", "2", "SLURM_STEP_NUM_NODES"]),
            ({"SLURM_STEP_TASKS_PER_NODE": "4(x3)"}, ["12", "8", "SLURM_STEP_NUM_TASKS"]),
            ({"SLURM_STEP_TASKS_PER_NODE": "4,3,1"}, ["SLURM_STEP_NUM_NODES says 2", "3"]),
            ({"SLURM_STEP_NODELIST": "node[01-03]"}, ["SLURM_STEP_NODELIST says 3", "2"]),
            ({"SLURM_STEP_NODELIST": "node[01-"}, ["SLURM_STEP_NODELIST='node[01-'"]),
            ({"SLURM_STEP_NODELIST": "(null)"}, ["'(null)'"]),
            ({"SLURM_STEP_TASKS_PER_NODE": "4(x2"}, ["SLURM_STEP_TASKS_PER_NODE='4(x2'"]),
            ({"SLURM_STEP_NUM_TASKS": "eight"}, ["SLURM_STEP_NUM_TASKS='eight'"]),
            ({"SLURM_STEP_NUM_TASKS": "0", "SLURM_STEP_TASKS_PER_NODE": None}, ["0"]),
            ({"SLURM_STEP_NUM_NODES": "9"}, ["SLURM_STEP_NUM_NODES says 9"]),
            ({"SLURM_JOB_NODELIST": "node01"}, ["SLURM_JOB_NODELIST says 1"]),
            ({"SLURMD_NODENAME": "node09"}, ["node09", "node[01-02]"]),
            # sbatch typed inside a step of another job.
            ({"SLURM_JOB_NODELIST": "node[03-04]"}, ["'node01'", "node[03-04]", "stale"]),
            ({"SLURM_STEP_TASKS_PER_NODE": None}, ["SLURM_STEP_TASKS_PER_NODE is not set"]),
            # A job's layout counts only where it comes to the step's number of tasks.
            (
                {"SLURM_STEP_TASKS_PER_NODE": None, "SLURM_TASKS_PER_NODE": "8(x2)"},
                ["SLURM_STEP_TASKS_PER_NODE is not set"],
            ),
            ({"SLURM_NODEID": None, "SLURM_LOCALID": "3"}, ["SLURM_NODEID is not set", "cyclic"]),
            ({"SLURM_STEP_NUM_TASKS": "+8"}, ["'+8'"]),
            ({"SLURM_STEP_NUM_TASKS": "8 "}, ["'8 '"]),
            ({"SLURM_PROCID": "-1"}, ["'-1'"]),
            ({"SLURM_PROCID": "12345678901"}, ["'12345678901'"]),
            ({"SLURM_PROCID": "\u0665"}, ["SLURM_PROCID="]),
        ],
    )
    def test_what_does_not_add_up_shows_both_values(
        self, changes: dict[str, str | None], parts: list[str]
    ) -> None:
        refused(step(**changes), *parts)

    def test_sizes_that_no_cluster_has_are_refused_at_once(self) -> None:
        huge = "9999999999"
        environ = step(
            SLURM_STEP_NUM_TASKS=huge,
            SLURM_STEP_NUM_NODES=huge,
            SLURM_STEP_TASKS_PER_NODE=None,
            SLURM_STEP_NODELIST=None,
        )
        refused(environ, huge)

    def test_an_error_carries_the_rank(self) -> None:
        assert refused(step(SLURM_LOCALID="x")).rank == 5

    @pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
    def test_torch_variables_must_agree_with_the_step(self, name: str) -> None:
        own = resolve(step()).environ()[name]
        check(resolve(step(**{name: own})), rank=5, launcher="slurm")
        check(resolve(step(**{name: ""})), rank=5, launcher="slurm")
        error = refused(step(**{name: "3"}), f"{name}=3", own, "TOOLKIT_RANKS_FROM=env")
        assert error.rank == 5
        check(resolve(step(**{name: "3", "TOOLKIT_RANKS_FROM": "slurm"})), rank=5, local_rank=1)

    def test_a_stale_node_rank_is_only_warned_about(self) -> None:
        world = resolve(step(NODE_RANK="0"))
        check(world, node_rank=1)
        assert "NODE_RANK=0" in world.warnings[0]

    def test_the_ranks_of_mpiexec_in_a_step_of_its_own_are_not_the_steps(self) -> None:
        refused(step(PMI_RANK="9", PMI_SIZE="16"), "PMI_SIZE=16", "TOOLKIT_RANKS_FROM=pmi")
        # As srun --mpi=pmi2 sets them, and as an outer shell's srun may have left them.
        check(resolve(step(PMI_RANK="5", PMI_SIZE="8")), rank=5, launcher="slurm")
        check(resolve(step(PMI_RANK="0", PMI_SIZE="1", PMIX_RANK="0")), launcher="slurm")

    def test_variables_that_slurm_24_sets_everywhere_are_no_sign_of_mpirun(self) -> None:
        environ = step(
            OMPI_MCA_plm_slurm_args="--external-launcher",
            PRTE_MCA_plm_slurm_args="--external-launcher",
            HYDRA_BOOTSTRAP="slurm",
        )
        check(resolve(environ), launcher="slurm", rank=5)


class TestNoLauncher:
    def test_one_process(self) -> None:
        world = resolve({})
        check(world, world_size=1, rank=0, local_rank=0, local_world_size=1, launcher="none")
        check(world, master_addr="127.0.0.1", warnings=())

    def test_case_4_4_a_batch_script_is_no_step(self) -> None:
        world = resolve(BATCH)
        check(world, world_size=1, rank=0, launcher="none")
        assert "asks for 8 tasks" in world.warnings[0]
        assert "not started by srun" in world.warnings[0]
        error = refused({**BATCH, "TOOLKIT_STRICT": "1"}, "asks for 8 tasks", "TOOLKIT_STRICT")
        assert error.rank == 0
        check(resolve({**BATCH, "TOOLKIT_RANKS_FROM": "none", "TOOLKIT_STRICT": "1"}), warnings=())

    def test_case_4_4_nodes_without_a_number_of_tasks(self) -> None:
        environ = {"SLURM_JOB_ID": "1", "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "0"}
        assert "asks for 2 tasks" in resolve(environ).warnings[0]
        assert resolve({**environ, "SLURM_TASKS_PER_NODE": "1"}).warnings == ()

    @pytest.mark.parametrize(
        ("environ", "size", "rank", "warned"),
        [
            pytest.param(
                {
                    "SLURM_JOB_NAME": "interactive",
                    "SLURM_NTASKS": "8",
                    "SLURM_TASKS_PER_NODE": "4(x2)",
                    "SLURM_JOB_NODELIST": "node[01-02]",
                },
                1,
                0,
                True,
                id="salloc",
            ),
            pytest.param(
                step(
                    SLURM_JOB_NAME="interactive",
                    SLURM_STEP_NUM_NODES=None,
                    SLURM_NODEID=None,
                    SLURM_NTASKS="8",
                    SLURM_PROCID="3",
                    SLURM_LOCALID="3",
                ),
                8,
                3,
                False,
                id="srun-in-salloc",
            ),
            pytest.param(
                {
                    "SLURM_JOB_NAME": "train",
                    "SLURM_STEP_ID": "0",
                    "SLURM_STEP_NUM_TASKS": "1",
                    "SLURM_NTASKS": "1",
                    "SLURM_PROCID": "0",
                    "SLURM_LOCALID": "0",
                    "SLURM_STEP_NODELIST": "node01",
                },
                1,
                0,
                False,
                id="one-task",
            ),
            *(
                pytest.param(
                    {
                        "SLURM_JOB_NAME": "interactive",
                        "SLURM_NTASKS": "8",
                        "SLURM_STEP_NUM_TASKS": "1",
                        "SLURM_PROCID": "0",
                        "SLURM_LOCALID": "0",
                        "SLURM_STEP_ID": str(special),
                    },
                    1,
                    0,
                    True,
                    id=f"special-step-{special}",
                )
                for special in range(4294967290, 4294967294)
            ),
        ],
    )
    def test_case_4_5_the_job_name_says_nothing(
        self, environ: dict[str, str], size: int, rank: int, warned: bool
    ) -> None:
        world = resolve(environ)
        check(world, world_size=size, rank=rank)
        assert bool(world.warnings) == warned

    def test_what_pyxis_sets_in_a_batch_script_is_no_world(self) -> None:
        pyxis = {"PYTORCH_VERSION": "2.13.0", "RANK": "0", "LOCAL_RANK": "0"}
        check(resolve({**BATCH, **pyxis}), world_size=1, launcher="none")
        hook = {"WORLD_SIZE": "8", "MASTER_PORT": "61001", "OMP_NUM_THREADS": "1"}
        check(resolve({**BATCH, **pyxis, **hook}), world_size=1, master_port=61001)

    def test_pmix_in_an_interactive_step_is_no_world(self) -> None:
        environ = {**BATCH, "SLURM_STEP_ID": "4294967290", "PMIX_RANK": "0"}
        check(resolve(environ), world_size=1, launcher="none")


TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "TORCHELASTIC_RUN_ID": "77",
    "MASTER_ADDR": "node02",
    "MASTER_PORT": "41573",
}


class TestTorchrun:
    def test_case_4_6_torchrun_beats_the_step_of_its_agent(self) -> None:
        environ = step(
            SLURM_STEP_NUM_TASKS="2",
            SLURM_STEP_TASKS_PER_NODE=None,
            SLURM_PROCID="1",
            SLURM_LOCALID="0",
            **TORCHRUN,
        )
        world = resolve(environ)
        check(world, world_size=8, rank=5, local_rank=1, local_world_size=4, node_rank=1)
        check(world, master_addr="node02", master_port=41573, launcher="torchrun", warnings=())

    def test_case_4_6_half_a_torchrun_set_leaves_the_step(self) -> None:
        check(resolve(step(TORCHELASTIC_RUN_ID="77")), launcher="slurm", rank=5)
        refused({"TORCHELASTIC_RUN_ID": "77", "RANK": "1"}, "WORLD_SIZE and LOCAL_RANK")

    def test_uneven_nodes(self) -> None:
        environ = {**TORCHRUN, "RANK": "4", "WORLD_SIZE": "5", "LOCAL_RANK": "0"}
        environ.update(LOCAL_WORLD_SIZE="1", GROUP_RANK="1", GROUP_WORLD_SIZE="2")
        check(resolve(environ), num_nodes=2, node_rank=1, local_world_size=1)

    def test_two_agents_on_one_machine_may_meet_on_loopback(self) -> None:
        world = resolve({**TORCHRUN, "MASTER_ADDR": "localhost", "GROUP_WORLD_SIZE": "2"})
        check(world, master_addr="localhost", num_nodes=2)


def ompi(size: int, rank: int, local_rank: int, local_size: int) -> dict[str, str]:
    values = {"SIZE": size, "RANK": rank, "LOCAL_RANK": local_rank, "LOCAL_SIZE": local_size}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in values.items()}


class TestMpi:
    def test_case_4_9_several_nodes_need_an_address(self) -> None:
        refused(ompi(8, 5, 1, 4), "MASTER_ADDR", "2 nodes")
        refused({**ompi(8, 5, 1, 4), "MASTER_ADDR": "localhost"}, "'localhost'", "MASTER_ADDR")

    def test_case_4_9_one_node(self) -> None:
        check(resolve(ompi(4, 2, 2, 4)), rank=2, world_size=4, local_rank=2, launcher="mpi")
        check(resolve(ompi(4, 2, 2, 4)), master_addr="127.0.0.1", num_nodes=1)

    def test_case_4_9_mpirun_in_a_batch_script(self) -> None:
        world = resolve({**BATCH, **ompi(8, 5, 1, 4), "MASTER_ADDR": "node01"})
        check(world, rank=5, world_size=8, local_rank=1, master_addr="node01", launcher="mpi")

    def test_case_4_9_a_pmix_rank_without_a_size(self) -> None:
        refused({"PMIX_RANK": "3"}, "PMIX_RANK=3", "without a size")

    def test_case_4_11_mpirun_beats_the_step_of_its_daemons(self) -> None:
        environ = step(
            SLURM_JOB_ID="31",
            SLURM_STEP_NUM_TASKS="2",
            SLURM_STEP_TASKS_PER_NODE="1(x2)",
            SLURM_PROCID="1",
            SLURM_LOCALID="0",
            MASTER_ADDR="node01",
            **ompi(4, 3, 1, 2),
        )
        world = resolve(environ)
        check(world, world_size=4, rank=3, local_rank=1, local_world_size=2, node_rank=1)
        check(world, master_addr="node01", launcher="mpi")

    def test_case_4_11_the_port_does_not_depend_on_the_daemons_step(self) -> None:
        # mpirun starts the ranks of its own node itself, outside any step.
        common = {**ompi(4, 3, 1, 2), "MASTER_ADDR": "node01"}
        outside = resolve({**BATCH, "SLURM_JOB_ID": "31", **common})
        inside = resolve(step(SLURM_JOB_ID="31", SLURM_STEP_ID="3", **common))
        assert outside.master_port == inside.master_port

    @pytest.mark.parametrize("missing", ["SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE"])
    def test_half_a_set_is_an_error_even_beside_a_step(self, missing: str) -> None:
        partial = ompi(8, 5, 1, 4)
        del partial[f"OMPI_COMM_WORLD_{missing}"]
        refused(step(**partial), f"OMPI_COMM_WORLD_{missing} is not set")

    def test_ranks_dealt_by_node(self) -> None:
        world = resolve({**ompi(8, 5, 2, 4), "MASTER_ADDR": "node01"})
        check(world, node_rank=1, local_rank=2)

    def test_uneven_nodes_need_to_be_named(self) -> None:
        environ = {**ompi(7, 4, 0, 3), "MASTER_ADDR": "node01"}
        refused(environ, "NODE_RANK and NUM_NODES", "7", "3")
        check(resolve({**environ, "NODE_RANK": "1", "NUM_NODES": "2"}), node_rank=1, num_nodes=2)
        refused({**ompi(8, 5, 3, 4), "MASTER_ADDR": "node01"}, "NODE_RANK and NUM_NODES")


class TestPmi:
    @pytest.mark.parametrize(
        "names",
        [
            ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
            ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
            ("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
        ],
        ids=["hydra", "cray", "mvapich"],
    )
    def test_ranks(self, names: tuple[str, str]) -> None:
        environ = {"PMI_RANK": "5", "PMI_SIZE": "8", "MASTER_ADDR": "node01"}
        environ.update({names[0]: "1", names[1]: "4"})
        check(resolve(environ), rank=5, world_size=8, local_rank=1, node_rank=1, launcher="pmi")

    def test_one_process_needs_no_place(self) -> None:
        check(resolve({"PMI_RANK": "0", "PMI_SIZE": "1"}), world_size=1, launcher="pmi")

    def test_what_is_missing_is_named(self) -> None:
        refused({"PMI_RANK": "5"}, "PMI_RANK=5", "PMI_SIZE")
        refused({"PMI_SIZE": "8"}, "PMI_RANK")
        refused({"PMI_RANK": "5", "PMI_SIZE": "8"}, "MPI_LOCALRANKID")

    def test_a_pmix_rank_completed_by_hand(self) -> None:
        environ = {"PMIX_RANK": "1", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
        check(resolve(environ), rank=1, world_size=2, launcher="env")
        refused({**environ, "PMIX_RANK": "0"}, "PMIX_RANK=0")


def env(rank: int, size: int, local_rank: int, **more: Any) -> dict[str, str]:
    values = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank, **more}
    return {name: str(value) for name, value in values.items()}


class TestEnv:
    def test_one_node(self) -> None:
        world = resolve(env(1, 2, 1))
        check(world, rank=1, local_world_size=2, num_nodes=1, master_addr="127.0.0.1")
        check(world, launcher="env", master_port=29500, warnings=())
        check(resolve(env(1, 2, 1, MASTER_ADDR="localhost")), num_nodes=1, local_world_size=2)

    def test_several_nodes(self) -> None:
        environ = env(5, 8, 1, LOCAL_WORLD_SIZE=4, MASTER_ADDR="a")
        check(resolve(environ), node_rank=1, num_nodes=2, master_addr="a", warnings=())
        del environ["MASTER_ADDR"]
        refused(environ, "MASTER_ADDR is not set", "2 nodes")

    def test_ranks_per_node_are_inferred_with_a_warning(self) -> None:
        world = resolve(env(5, 8, 1, MASTER_ADDR="a"))
        check(world, local_world_size=4, num_nodes=2, node_rank=1)
        assert "LOCAL_WORLD_SIZE" in world.warnings[0]
        check(resolve(env(5, 8, 1, MASTER_ADDR="a", NNODES=2)), local_world_size=4, warnings=())
        refused(env(5, 8, 4, MASTER_ADDR="a"), "set LOCAL_WORLD_SIZE")

    @pytest.mark.parametrize(
        ("environ", "shown"),
        [
            ({"WORLD_SIZE": "8"}, ["WORLD_SIZE='8'", "RANK and LOCAL_RANK"]),
            ({"RANK": "1"}, ["RANK='1'", "WORLD_SIZE and LOCAL_RANK"]),
            ({"RANK": "1", "WORLD_SIZE": "2"}, ["LOCAL_RANK"]),
            ({"RANK": "1", "WORLD_SIZE": "", "LOCAL_RANK": "1"}, ["not WORLD_SIZE"]),
            (env(2, 2, 0), ["rank 2", "RANK", "world_size 2"]),
            (env(0, 0, 0), ["0"]),
            (env(1, 2, 1, LOCAL_WORLD_SIZE=1, MASTER_ADDR="a"), ["LOCAL_RANK=1"]),
            (env(1, 2, 1, LOCAL_WORLD_SIZE=4, MASTER_ADDR="a"), ["4", "2"]),
            (env(1, 2, 1, LOCAL_WORLD_SIZE=0, MASTER_ADDR="a"), ["0"]),
            (env(5, 8, 1, LOCAL_WORLD_SIZE=4, NODE_RANK=2, MASTER_ADDR="a"), ["NODE_RANK", "2"]),
            (env(1, 2, 1, RANK="1.0"), ["'1.0'"]),
        ],
    )
    def test_what_is_partial_or_wrong(self, environ: dict[str, str], shown: list[str]) -> None:
        refused(environ, *shown)

    def test_an_empty_variable_is_an_unset_one(self) -> None:
        check(resolve({"RANK": "", "WORLD_SIZE": "", "LOCAL_RANK": ""}), launcher="none")


class TestForced:
    def test_a_launcher_that_leaves_no_mark(self) -> None:
        # DeepSpeed's, in a step of one task per node.
        environ = step(
            SLURM_STEP_NUM_TASKS="2",
            SLURM_STEP_TASKS_PER_NODE="1(x2)",
            SLURM_PROCID="1",
            SLURM_LOCALID="0",
            **env(5, 8, 1, LOCAL_WORLD_SIZE=4, MASTER_ADDR="node01"),
        )
        refused(environ, "RANK=5", "TOOLKIT_RANKS_FROM=env")
        check(resolve({**environ, "TOOLKIT_RANKS_FROM": "env"}), rank=5, world_size=8)
        check(resolve({**environ, "TOOLKIT_RANKS_FROM": "torchrun"}), rank=5, launcher="torchrun")
        check(resolve({**environ, "TOOLKIT_RANKS_FROM": "slurm"}), rank=1, world_size=2)
        check(resolve({**environ, "TOOLKIT_RANKS_FROM": "none"}), rank=0, world_size=1)

    @pytest.mark.parametrize(
        ("launcher", "missing"),
        [
            ("torchrun", "WORLD_SIZE"),
            ("mpi", "OMPI_COMM_WORLD_SIZE"),
            ("slurm", "SLURM_STEP_ID"),
            ("pmi", "PMI_RANK"),
            ("env", "WORLD_SIZE"),
        ],
    )
    def test_what_is_missing_is_named(self, launcher: str, missing: str) -> None:
        refused({"TOOLKIT_RANKS_FROM": launcher}, missing)
        refused({**BATCH, "TOOLKIT_RANKS_FROM": launcher}, missing)

    def test_a_special_step_cannot_be_forced(self) -> None:
        refused(step(SLURM_STEP_ID="4294967291", TOOLKIT_RANKS_FROM="slurm"), "4294967291", "srun")

    def test_an_unknown_name(self) -> None:
        refused({"TOOLKIT_RANKS_FROM": "Slurm"}, "'Slurm'", ", ".join(names()))
        refused({**BATCH, "TOOLKIT_STRICT": "maybe"}, "'maybe'")

    @pytest.mark.parametrize("strict", ["0", "1"])
    def test_the_old_name_of_the_variable_is_understood_with_a_note(self, strict: str) -> None:
        environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
        old = {**step(), **environ, "MASTER_ADDR": "node01", "TOOLKIT_STRICT": strict}
        world = resolve({**old, "TOOLKIT_LAUNCHER": "env"})
        check(world, rank=5, launcher="env")
        (note,) = world.warnings
        assert "TOOLKIT_RANKS_FROM=env" in note
        check(resolve({**old, "TOOLKIT_LAUNCHER": "env", "TOOLKIT_RANKS_FROM": "none"}), rank=0)

    def test_what_the_option_of_that_name_says_is_not_for_the_entrypoint(self) -> None:
        check(resolve({**step(), "TOOLKIT_LAUNCHER": "srun"}), launcher="slurm", warnings=())
        refused({"TOOLKIT_LAUNCHER": "mpirun"}, "TOOLKIT_LAUNCHER='mpirun'", "TOOLKIT_RANKS_FROM")
