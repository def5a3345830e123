"""What the local target decides, from a machine and a job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.jobs import PYTHON, decided, make_spec
from toolkit.errors import UsageError
from toolkit.targets import local

if TYPE_CHECKING:
    from toolkit.plan import Plan

RUN = Path("/runs/x")


def machine(**changes: Any) -> local.Machine:
    values: dict[str, Any] = {
        "hostname": "ws",
        "cpus": 8,
        "gpus": (),
        "job_id": 7,
        "port": 12345,
    }
    return local.Machine(**{**values, **changes})


def plan_of(environ: dict[str, str] | None = None, **options: Any) -> Plan:
    job = decided(environ, target="local", cwd=Path("/code"), run_dir=RUN, **options)
    return local.plan(job, machine())


def test_each_rank_gets_what_a_slurm_step_would_give_it() -> None:
    plan = plan_of(command=("a",), nodes=2, ntasks_per_node=2)
    assert plan.env["SLURM_STEP_TASKS_PER_NODE"] == "2(x2)"
    assert plan.env["SLURM_STEP_NODELIST"] == "node[0-1]"
    assert plan.env["SLURM_CPUS_PER_TASK"] == "2"
    keys = ("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID")
    assert [tuple(p.env[key] for key in keys) for p in plan.processes] == [
        ("0", "0", "0"),
        ("1", "0", "1"),
        ("2", "1", "0"),
        ("3", "1", "1"),
    ]


def test_every_rank_starts_through_the_isolated_entrypoint() -> None:
    plan = plan_of(command=("train", ""))
    entry = (PYTHON, "-I", "-S", f"{RUN}/entrypoint.pyz", "--")
    assert plan.processes[0].argv == (*entry, "train", "")


def test_a_workload_travels_with_the_run() -> None:
    plan = plan_of(workload="sage", workload_args=("--epochs", "2"))
    assert plan.processes[0].argv[5:] == (PYTHON, f"{RUN}/lib/workloads", "sage", "--epochs", "2")
    assert "--workload" in plan.stage


def test_nothing_of_an_outer_job_reaches_the_ranks() -> None:
    environ = {
        "SLURM_STEP_NUM_TASKS": "9",
        "SLURM_CPU_BIND": "x",
        "RANK": "3",
        "OMPI_COMM_WORLD_RANK": "1",
        "PMIX_RANK": "1",
        "TORCHELASTIC_RUN_ID": "1",
        "MASTER_ADDR": "elsewhere",
        "SLURM_CONF": "/etc/slurm.conf",
        "HOME": "/home/u",
        "MASTER_PORT": "29501",  # the outer rank's, not the user's
    }
    plan = plan_of(environ, command=("a",))
    seen = plan.environment(plan.processes[0], environ)
    assert seen["SLURM_STEP_NUM_TASKS"] == "1"
    assert not {"RANK", "SLURM_CPU_BIND", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "MASTER_ADDR"} & set(
        seen
    )
    assert "TORCHELASTIC_RUN_ID" not in seen
    assert (seen["SLURM_CONF"], seen["HOME"]) == ("/etc/slurm.conf", "/home/u")
    assert seen["MASTER_PORT"] == "12345"


def test_a_users_own_port_is_kept() -> None:
    environ = {"MASTER_PORT": "29501"}
    plan = plan_of(environ, command=("a",))
    assert plan.environment(plan.processes[0], environ)["MASTER_PORT"] == "29501"


def test_the_users_variables_win() -> None:
    plan = plan_of(env=(("GLOO_SOCKET_IFNAME", "eth0"), ("NOTE", "a b")))
    assert plan.env["GLOO_SOCKET_IFNAME"] == "eth0"
    assert plan.env["NOTE"] == "a b"


def test_a_variable_to_pass_on_must_be_there() -> None:
    with pytest.raises(UsageError, match="TOKEN"):
        plan_of(env_names=("TOKEN",))
    plan = plan_of({"TOKEN": "hunter2"}, env_names=("TOKEN",))
    assert "hunter2" not in plan.script()
    assert plan.environment(plan.processes[0], {"TOKEN": "hunter2"})["TOKEN"] == "hunter2"


def test_file_rendezvous_is_a_fresh_file_of_this_run() -> None:
    plan = plan_of(command=("a",), rendezvous="file")
    assert plan.env["TOOLKIT_INIT_METHOD"] == f"file://{RUN}/rendezvous"


@pytest.mark.parametrize(
    ("variable", "listing", "found"),
    [
        (None, "", ()),
        ("0,1", "", ()),  # the variable alone is no GPU
        (None, "GPU 0: A (UUID: GPU-1)\nGPU 1: A (UUID: GPU-2)\n", ("0", "1")),
        ("1", "GPU 0: A\nGPU 1: A\n", ("1",)),
        ("GPU-8932f9, GPU-aa11bb", "GPU 0: A\nGPU 1: A\n", ("GPU-8932f9", "GPU-aa11bb")),
        ("", "GPU 0: A\n", ()),
    ],
)
def test_gpus_are_counted_by_the_driver_and_named_by_the_variable(
    variable: str | None, listing: str, found: tuple[str, ...]
) -> None:
    assert local.visible_gpus(variable, listing) == found


@pytest.mark.parametrize(
    ("gpus", "job", "shares"),
    [
        (4, {"nodes": 2, "ntasks_per_node": 2}, ["0,1", "2,3"]),
        (4, {"nodes": 2, "ntasks_per_node": 1}, ["0,1", "2,3"]),
        (4, {"nodes": 2, "ntasks_per_node": 1, "gpus_per_node": 1}, ["0", "1"]),
        (2, {"nodes": 2, "ntasks_per_node": 2}, ["", ""]),  # fewer than ranks: CPUs, and a note
        (2, {"nodes": 1, "gpus_per_node": 0}, [""]),
        (0, {"nodes": 2}, None),
    ],
)
def test_gpus_are_divided_among_the_nodes(
    gpus: int, job: dict[str, int], shares: list[str] | None
) -> None:
    names = tuple(str(index) for index in range(gpus))
    spec = make_spec(**job)
    found, note = local.divide_gpus(names, spec)
    assert found == shares
    assert (note is not None) == (shares == ["", ""])


def test_what_has_no_effect_here_is_said() -> None:
    plan = plan_of(command=("a",), container_image="x", srun_arg=("-v",))
    assert any("--container-image" in note for note in plan.notes)
    assert any("--srun-arg" in note for note in plan.notes)
