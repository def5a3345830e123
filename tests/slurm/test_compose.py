"""What the composed srun and sbatch do on a real cluster: cases of kinds 6, 8 and 10 by id."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.jobs import decided
from toolkit.options import JobSpec
from toolkit.slurm import queue
from toolkit.targets import slurm

if TYPE_CHECKING:
    from toolkit.plan import Plan

PYTHON = "/usr/bin/python3"
SHOW = f"""#!{PYTHON}
import json, os, sys
file = os.environ.get("SHOW_IN", os.getcwd()) + "/" + os.environ["SLURM_PROCID"] + ".json"
with open(file, "w") as out:
    json.dump({{"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd()}}, out)
"""
NASTY = (
    "sampling=c(4,2*7)",
    "it's $HOME",
    "a\\b`c",
    '--q="x y"',
    "",
    "*",
    "a\nb",
    "a:b",
    "é",
    "-n",
)
VALUES = {
    "NCCL_IB_HCA": "mlx5_0,mlx5_1",
    "NCCL_SOCKET_IFNAME": "^lo,docker0",
    "NOTE": "it's $5; ok",
    "LINES": "a\nb\\\r\n",
    "EMPTY": "",
}


class Cluster:
    """A folder on the shared storage, and plans carried out in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.show = folder / "show.py"
        self.show.write_text(SHOW)

    def plan(self, spec: JobSpec, environ: dict[str, str] | None = None) -> Plan:
        """What toolkit run would do in ``environ``."""
        return self.plan_in("run", spec, environ)

    def batch(self, spec: JobSpec, environ: dict[str, str] | None = None) -> Plan:
        """What toolkit submit would do in ``environ``."""
        return self.plan_in("run", spec, environ, batch=True)

    def plan_in(
        self, name: str, spec: JobSpec, environ: dict[str, str] | None = None, **more: Any
    ) -> Plan:
        """The plan of a run that is called ``name``."""
        environ = environ or dict(os.environ)
        where: dict[str, Any] = {"cwd": self.folder, "run_dir": self.folder / name}
        outer = environ.get("SLURM_JOB_ID")
        where["allocated"] = outer is not None and not queue.stale(outer, environ)
        job = decided(
            environ, spec=spec, python=sys.executable, exists=os.path.exists, **where, **more
        )
        return slurm.plan(job)

    def paste(
        self, plan: Plan, environ: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a plan as it is printed."""
        return subprocess.run(
            ["bash", "-c", plan.script()],
            env=environ,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def seen(self) -> list[dict[str, Any]]:
        """What each rank saw, in order."""
        files = sorted(self.folder.glob("*.json"), key=lambda file: int(file.stem))
        return [json.loads(file.read_text()) for file in files]


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Cluster:
    name = "".join(c if c.isalnum() else "-" for c in request.node.name)
    folder = (
        Path(os.environ["TOOLKIT_TESTBED_SHARED"]) / f"{tmp_path_factory.getbasetemp().name}-{name}"
    )
    folder.mkdir(parents=True)
    return Cluster(folder)


def job(cluster: Cluster, *arguments: str, **options: Any) -> JobSpec:
    return JobSpec(command=(PYTHON, str(cluster.show), *arguments), **options)


WAIT: dict[str, Any] = {"sbatch_arg": ("--wait",)}


@pytest.mark.parametrize("extra", [(), (":",)], ids=["case_8_5", "case_8_5_lone_colon"])
@pytest.mark.parametrize("how", ["srun", "sbatch"])
def test_arguments_arrive_byte_for_byte(cluster: Cluster, how: str, extra: tuple[str, ...]) -> None:
    spec = job(cluster, *NASTY, *extra, nodes=2, job_name="Big simulation #1", **WAIT)
    plan = cluster.plan(spec) if how == "srun" else cluster.batch(spec)
    ran = cluster.paste(plan)
    assert ran.returncode == 0, ran.stderr
    assert [rank["argv"] for rank in cluster.seen()] == [[*NASTY, *extra]] * 2
    assert cluster.seen()[0]["env"]["SLURM_JOB_NAME"] == "Big simulation #1"


@pytest.mark.parametrize("how", ["srun", "sbatch"])
def test_variables_arrive_byte_for_byte_case_8_1_and_8_2(cluster: Cluster, how: str) -> None:
    environ = {**os.environ, "WANDB_API_KEY": "hunter2", "PLAIN": "by name, $x"}
    passed_on = (("WANDB_API_KEY", None), ("PLAIN", None))
    spec = job(cluster, env=(*VALUES.items(), *passed_on), **WAIT)
    plan = cluster.plan(spec, environ) if how == "srun" else cluster.batch(spec, environ)
    assert "hunter2" not in plan.script()
    ran = cluster.paste(plan, environ)
    assert ran.returncode == 0, ran.stderr
    seen = cluster.seen()[0]["env"]
    wanted = {**VALUES, "WANDB_API_KEY": "hunter2", "PLAIN": "by name, $x"}
    assert {name: seen[name] for name in wanted} == wanted
    assert seen["HOME"] == os.environ["HOME"]


def step_environ() -> dict[str, str]:
    """The environment of a rank of an outer job."""
    command = ["srun", "-N1", "-n2", "-c2", "-pshort", "env", "-0"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    return dict(item.split("=", 1) for item in found.split("\0") if "=" in item)


@pytest.mark.parametrize("how", ["srun", "sbatch"])
def test_nothing_of_an_outer_job_leaks_case_8_9(cluster: Cluster, how: str) -> None:
    outer = step_environ()
    environ = {
        **outer,
        "SBATCH_PARTITION": "short",
        "SLURM_CPU_BIND": "quiet,mask_cpu:0x3",
        "PMIX_RANK": "0",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "elsewhere",
        "PYXIS_CONTAINER_IMAGE": "/nonexistent.sqsh",
    }
    spec = job(cluster, nodes=2, ntasks_per_node=2, **WAIT)
    plan = cluster.plan(spec, environ) if how == "srun" else cluster.batch(spec, environ)
    ran = cluster.paste(plan, environ)
    assert ran.returncode == 0, ran.stderr
    for rank, seen in enumerate(cluster.seen()):
        env = seen["env"]
        assert (env["SLURM_STEP_NUM_TASKS"], env["WORLD_SIZE"], env["RANK"]) == (
            "4",
            "4",
            str(rank),
        )
        assert env["SLURM_JOB_ID"] != outer["SLURM_JOB_ID"]
        assert env["SLURM_JOB_PARTITION"] == "main"
        assert env["MASTER_ADDR"] == "node01"
        assert not {"PMIX_RANK", "SBATCH_PARTITION", "PYXIS_CONTAINER_IMAGE"} & set(env)


def salloc_environ(cluster: Cluster, *options: str) -> tuple[subprocess.Popen[str], dict[str, str]]:
    """An allocation that stays until its process is told to end, and its variables."""
    process = subprocess.Popen(
        ["salloc", "-Q", *options, "bash", "-c", "env -0; echo; cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=cluster.folder,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    return process, dict(item.split("=", 1) for item in line.split("\0") if "=" in item)


def test_a_step_in_an_allocation(cluster: Cluster) -> None:
    process, environ = salloc_environ(cluster, "-N2", "-n8")
    try:
        spec = job(cluster, nodes=2, ntasks_per_node=2)
        plan = cluster.plan(spec, environ)
        ran = cluster.paste(plan, environ)
        assert ran.returncode == 0, ran.stderr
        seen = [rank["env"] for rank in cluster.seen()]
        assert [env["RANK"] for env in seen] == ["0", "1", "2", "3"]
        assert {env["SLURM_JOB_ID"] for env in seen} == {environ["SLURM_JOB_ID"]}
        assert [env["SLURM_STEP_TASKS_PER_NODE"] for env in seen] == ["2(x2)"] * 4
        assert [env["SLURMD_NODENAME"] for env in seen] == ["node01"] * 2 + ["node02"] * 2
    finally:
        process.communicate("", timeout=30)
    stale = queue.stale(environ["SLURM_JOB_ID"], environ)
    assert environ["SLURM_JOB_ID"] in stale


def test_steps_of_one_job_run_at_the_same_time(cluster: Cluster) -> None:
    process, environ = salloc_environ(cluster, "-N2", "--ntasks-per-node=2")
    meet = "touch $1; for i in $(seq 100); do test -e $2 && exit 0; sleep 0.1; done; exit 1"
    try:
        plans = []
        for here, there in (("a", "b"), ("b", "a")):
            command = ("sh", "-c", meet, "sh", here, there)
            spec = JobSpec(command=command, nodes=2, ntasks_per_node=2)
            plans.append(cluster.plan_in(f"run-{here}", spec, environ).script())
        steps = [subprocess.Popen(["bash", "-c", script], env=environ) for script in plans]
        assert [step.wait(timeout=60) for step in steps] == [0, 0]
    finally:
        process.communicate("", timeout=30)


def test_cpus_and_tasks_are_those_asked_for_case_8_4_and_8_10(cluster: Cluster) -> None:
    spec = job(cluster, cpus_per_task=2, sbatch_arg=("--wait", "--exclusive"))
    ran = cluster.paste(cluster.batch(spec))
    assert ran.returncode == 0, ran.stderr
    (rank,) = cluster.seen()
    assert (rank["env"]["WORLD_SIZE"], rank["env"]["SLURM_CPUS_PER_TASK"]) == ("1", "2")


def test_gpus_are_all_visible_to_each_rank_case_5_5(cluster: Cluster) -> None:
    spec = job(cluster, nodes=2, ntasks_per_node=2, gpus_per_node=2)
    ran = cluster.paste(cluster.plan(spec))
    assert ran.returncode == 0, ran.stderr
    for rank in cluster.seen():
        assert rank["env"]["SLURM_GPUS_ON_NODE"] == "2"
        assert rank["env"].get("CUDA_VISIBLE_DEVICES") in {None, "0,1"}


FAIL = "test $RANK = 1 && exit 3; sleep 60"


@pytest.mark.parametrize("how", ["srun", "sbatch"])
def test_one_failing_rank_ends_all_case_10_4(cluster: Cluster, how: str) -> None:
    spec = JobSpec(command=("sh", "-c", FAIL), nodes=2, ntasks_per_node=2, **WAIT)
    plan = cluster.plan(spec) if how == "srun" else cluster.batch(spec)
    begun = time.monotonic()
    ran = cluster.paste(plan)
    assert time.monotonic() - begun < 30
    assert ran.returncode != 0
    if how == "sbatch":
        assert ran.returncode == 3
        result = json.loads((cluster.folder / "run" / "result.json").read_text())
        assert (result["exit_code"], result["failure"]["rank"]) == (3, 1)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.1)


def test_a_warning_signal_reaches_every_rank_case_8_7(cluster: Cluster) -> None:
    listen = "trap 'touch got-$RANK; exit 0' USR2; touch up-$RANK; while :; do sleep 0.1; done"
    spec = JobSpec(command=("sh", "-c", listen), nodes=2, signal="USR2@60", time=600)
    ran = cluster.paste(cluster.batch(spec))
    number = ran.stdout.strip()
    for rank in (0, 1):
        wait_for(cluster.folder / f"up-{rank}")
    # What Slurm does 60 s before the limit, without the wait.
    subprocess.run(["scancel", "--signal=USR2", number], check=True, timeout=30)
    wait_for(cluster.folder / "run" / "result.json")
    assert (cluster.folder / "got-0").exists()
    assert (cluster.folder / "got-1").exists()
    assert json.loads((cluster.folder / "run" / "result.json").read_text())["exit_code"] == 0


def test_a_cancelled_job_still_records_its_end(cluster: Cluster) -> None:
    spec = JobSpec(command=("sh", "-c", "touch up-$RANK; sleep 60"), nodes=2)
    number = cluster.paste(cluster.batch(spec)).stdout.strip()
    for rank in (0, 1):
        wait_for(cluster.folder / f"up-{rank}")
    subprocess.run(["scancel", number], check=True, timeout=30)
    wait_for(cluster.folder / "run" / "result.json")
    assert json.loads((cluster.folder / "run" / "result.json").read_text())["exit_code"] == 130


def test_a_job_that_ends_with_75_is_queued_again_case_8_7(cluster: Cluster) -> None:
    spec = JobSpec(command=("sh", "-c", "exit 75"))
    number = cluster.paste(cluster.batch(spec)).stdout.strip()
    try:
        wait_for(cluster.folder / "run" / "result-0.json")
        deadline = time.monotonic() + 30
        shown = ""
        while "Restarts=1" not in shown and time.monotonic() < deadline:
            command = ["scontrol", "show", "job", number]
            shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            time.sleep(0.2)
        assert "Restarts=1" in shown
        assert not (cluster.folder / "run" / "result.json").exists()
    finally:
        subprocess.run(["scancel", number], check=True, timeout=30)


COMMENTS = (
    "Big simulation",
    "a # b",
    "it's",
    'say "hi"',
    "back\\slash \\",
    "$HOME `x`",
    "é",
    "x=1,y",
)


def test_header_values_arrive_byte_for_byte_case_8_5(cluster: Cluster) -> None:
    for number, name in enumerate(COMMENTS):
        spec = JobSpec(command=("true",), job_name=name, hold=True)
        plan = cluster.plan_in(str(number), spec, batch=True)
        ran = cluster.paste(plan)
        assert ran.returncode == 0, ran.stderr
        job_id = ran.stdout.strip()
        shown = subprocess.run(
            ["squeue", "--noheader", "--format=%j", "--jobs", job_id],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        ).stdout
        subprocess.run(["scancel", job_id], check=True, timeout=30)
        assert shown.removesuffix("\n") == name


def test_each_element_of_an_array_has_its_own_run(cluster: Cluster) -> None:
    command = ("sh", "-c", "echo $TOOLKIT_INIT_METHOD")
    spec = JobSpec(command=command, array="1-2", rendezvous="file", **WAIT)
    ran = cluster.paste(cluster.batch(spec))
    assert ran.returncode == 0, ran.stderr
    files = []
    for index in (1, 2):
        run = cluster.folder / f"run_{index}"
        assert json.loads((run / "result.json").read_text())["exit_code"] == 0
        files.append((run / "logs" / "rank-0.log").read_text().strip())
        assert files[-1].startswith(f"file://{run}/rendezvous-")
    assert len(set(files)) == 2


def test_torchrun_starts_the_ranks_in_slurms_order(cluster: Cluster) -> None:
    names = "('RANK', 'WORLD_SIZE', 'NODE_RANK', 'SLURMD_NODENAME')"
    # In one write: two ranks of a node share srun's stream.
    show = f"import os; os.write(1, ' '.join([*map(os.environ.get, {names}), '\\n']).encode())"
    command = (sys.executable, "-c", show)
    spec = JobSpec(command=command, nodes=2, ntasks_per_node=2, launcher="torchrun")
    ran = cluster.paste(cluster.plan(spec))
    assert ran.returncode == 0, ran.stderr
    lines = sorted(line.partition(": ")[2].strip() for line in ran.stdout.splitlines())
    assert lines == [
        "0 4 0 node01",
        "1 4 0 node01",
        "2 4 1 node02",
        "3 4 1 node02",
    ]
