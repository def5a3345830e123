"""What of the caller's environment reaches a job, and whether a step fits. Kind 8 by id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.jobs import decided, make_spec
from toolkit.errors import UnavailableError, UsageError
from toolkit.slurm import environment
from toolkit.targets import slurm

OUTER = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "node01",
    "SLURM_NTASKS": "2",
    "SLURM_CPUS_PER_TASK": "1",
    "SLURM_CPU_BIND": "quiet,mask_cpu:0x3",
    "SLURM_TRES_PER_TASK": "cpu=1",
    "SLURM_GPUS_PER_TASK": "1",
    "SLURM_EXPORT_ENV": "NONE",
    "SLURMD_NODENAME": "node01",
    "SBATCH_PARTITION": "p",
    "SRUN_DEBUG": "3",
    "SALLOC_PARTITION": "p",
    "PMIX_RANK": "0",
    "PMI_RANK": "0",
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_MCA_plm_slurm_args": "x",
    "_SLURM_SPANK_OPTION_pyxis_container_image": "x",
    "PYXIS_CONTAINER_IMAGE": "x",
    "TORCHELASTIC_RUN_ID": "1",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node01",
    "MASTER_PORT": "12345",
    "TOOLKIT_INIT_METHOD": "file:///old",
}
JOB = {
    "SLURM_JOB_ID": "12",
    "SLURM_JOBID": "12",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "node[01-02]",
    "SLURM_JOB_CPUS_PER_NODE": "4(x2)",
    "SLURM_ARRAY_TASK_ID": "3",
    "SLURM_RESTART_COUNT": "1",
}
KEPT = {"SLURM_CONF": "/etc/slurm.conf", "HOME": "/home/u", "PATH": "/bin", "NCCL_DEBUG": "INFO"}
EVERYTHING = {**OUTER, **JOB, **KEPT}


def test_case_8_9_a_new_job_sees_nothing_of_the_old_one() -> None:
    assert set(environment.outer(EVERYTHING)) == set(OUTER) | set(JOB)


def test_case_8_9_a_step_sees_its_job_and_nothing_of_another_step() -> None:
    assert set(environment.outer(EVERYTHING, step=True)) == set(OUTER)


def test_case_8_9_what_the_user_asks_for_is_kept() -> None:
    asked: dict[str, Any] = {"env": (("SLURM_CPU_BIND", "none"),), "env_names": ("PMIX_RANK",)}
    job = decided(EVERYTHING, batch=True, **asked)
    assert not {"SLURM_CPU_BIND", "PMIX_RANK"} & set(job.unset)
    plan = slurm.plan(job)
    sees = plan.environment(plan.processes[0], EVERYTHING)
    assert (sees["SLURM_CPU_BIND"], sees["PMIX_RANK"]) == ("none", "0")


def test_a_port_of_the_users_own_is_kept_and_an_address_only_in_a_step() -> None:
    mine = {"MASTER_PORT": "29501", "MASTER_ADDR": "here"}
    assert environment.outer(mine) == ("MASTER_ADDR",)
    assert environment.outer(mine, step=True) == ()


def test_login_node_software_stays_out_of_a_container_only() -> None:
    login = {"PYTHONHOME": "/p", "LD_PRELOAD": "x", "CONDA_PREFIX": "/c", "CONDA_EXE": "/c/conda"}

    def unset(**options: Any) -> set[str]:
        return set(slurm.plan(decided({**login, **KEPT}, **options)).unset)

    assert unset() == set()
    assert unset(container_image="ubuntu") == set(login)
    named = unset(container_image="ubuntu", env=(("PYTHONHOME", "/x"),), env_names=("CONDA_EXE",))
    assert named == {"LD_PRELOAD", "CONDA_PREFIX"}


def test_a_home_that_is_mounted_brings_no_packages_of_the_login_node() -> None:
    job = decided(container_image="ubuntu", container_mount_home=True)
    assert job.variables()["PYTHONNOUSERSITE"] == "1"
    assert "PYTHONNOUSERSITE" not in decided().variables()


def test_a_rendezvous_file_is_one_of_this_attempt() -> None:
    job = decided(rendezvous="file").at(Path("/r"), "-7-1")
    assert job.variables()["TOOLKIT_INIT_METHOD"] == "file:///r/rendezvous-7-1"


@pytest.mark.parametrize("target", ["local", "slurm"])
@pytest.mark.parametrize("folder", ["a?b", "a#b", "a\tb", "a\nb"])
def test_a_rendezvous_file_is_never_outside_of_the_run(target: str, folder: str) -> None:
    """torch cuts such an address short: on one machine the ranks met at ``a``."""
    options: dict[str, Any] = {"target": target, "run_dir": Path("/home/u", folder, "x")}
    with pytest.raises(UsageError, match="--runs"):
        decided(rendezvous="file", **options)
    decided(**options)
    decided(rendezvous="file", container_image="ubuntu", **{**options, "target": "slurm"})


def test_the_users_values_win_over_the_images() -> None:
    environ = {"MASTER_PORT": "1234", "TOOLKIT_STRICT": "1", "MASTER_ADDR": "x", "TOKEN": "t"}
    job = decided(environ, env=(("NCCL_DEBUG", "INFO"),), env_names=("TOKEN",))
    names = environment.container_env(job)
    assert set(names) == {
        *("TOOLKIT_TARGET", "TOOLKIT_RUN_DIR", "PYTHONUNBUFFERED"),
        *("NCCL_DEBUG", "TOKEN", "MASTER_PORT", "TOOLKIT_STRICT"),
    }


def test_a_variable_to_pass_on_must_be_there() -> None:
    with pytest.raises(UsageError, match="TOKEN"):
        decided(env_names=("TOKEN",))


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": ""},
        {"SLURM_JOB_ID": "7", "TOOLKIT_TARGET": "local"},
        {"SLURM_NTASKS": "2"},
    ],
)
def test_no_allocation(environ: dict[str, str]) -> None:
    assert environment.allocation(environ) is None


def environ(cpus: str = "4(x2)", nodes: str = "2", hosts: str = "node[01-02]") -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_JOB_CPUS_PER_NODE": cpus,
        "SLURM_JOB_NODELIST": hosts,
    }


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"nodes": 2, "ntasks_per_node": 4}, environ()),
        ({"nodes": 1, "ntasks_per_node": 4}, environ()),
        ({"nodes": 2, "ntasks_per_node": 2, "cpus_per_task": 2}, environ()),
        ({"nodes": 2, "ntasks_per_node": 2}, environ("7,1")),
        ({"nodes": 1, "ntasks_per_node": 7}, environ("7,1")),
        ({"nodes": 2, "ntasks_per_node": 99}, {"SLURM_JOB_ID": "7"}),
        ({"nodes": 2}, environ("nonsense", "many")),
    ],
)
def test_a_step_that_fits(options: dict[str, int], where: dict[str, str]) -> None:
    job = environment.allocation(where)
    assert job is not None
    environment.fits(make_spec(**options), job)


@pytest.mark.parametrize(
    ("options", "where", "says"),
    [
        ({"nodes": 3}, environ(), "--nodes 3"),
        ({"nodes": 2, "ntasks_per_node": 5}, environ(), "4, 4 CPUs"),
        ({"nodes": 2, "ntasks_per_node": 4, "cpus_per_task": 2}, environ(), "4, 4 CPUs"),
        ({"nodes": 2, "ntasks_per_node": 2, "cpus_per_task": 1}, environ("7,1"), "7, 1 CPUs"),
        ({"nodes": 1, "ntasks_per_node": 8}, environ("7,1"), "7 CPUs"),
    ],
)
def test_a_step_that_does_not_fit_is_78(
    options: dict[str, int], where: dict[str, str], says: str
) -> None:
    job = environment.allocation(where)
    assert job is not None
    with pytest.raises(UnavailableError, match=says) as caught:
        environment.fits(make_spec(**options), job)
    assert caught.value.exit_code == 78
    assert "SLURM_JOB_ID=7" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "where", "hosts"),
    [
        ({"nodes": 2, "ntasks_per_node": 2}, environ(), ()),
        ({"nodes": 2, "ntasks_per_node": 2}, environ("7,1"), ("node01",) * 2 + ("node02",) * 2),
        ({"nodes": 1, "ntasks_per_node": 2}, environ("1,7"), ()),
        ({"nodes": 2, "ntasks_per_node": 2, "launcher": "torchrun"}, environ("7,1"), ()),
        (
            {"nodes": 2, "ntasks_per_node": 2},
            environ("1(x2),7", "3", "node[01-03]"),
            ("node01",) * 2 + ("node03",) * 2,
        ),
    ],
)
def test_ranks_are_placed_where_the_allocation_is_uneven(
    options: dict[str, Any], where: dict[str, str], hosts: tuple[str, ...]
) -> None:
    job = environment.allocation(where)
    assert job is not None
    assert environment.uneven(make_spec(**options), job) == hosts
