"""``toolkit run``, ``submit``, ``status``, ``logs`` and ``cancel`` on a real cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import testbed
from tests.cli import LIMIT, TOOLKIT, shared_folder, toolkit

SHOW = "import os; print(*(os.environ[k] for k in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR')))"
# A script in the tutorials' style: torchrun's variables, else Slurm's.
TUTORIAL = """\
import os
import torch
import torch.distributed as dist

rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0)))
world = int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", 1)))
local = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", 0)))
dist.init_process_group(
    "gloo", init_method=os.environ.get("TOOLKIT_INIT_METHOD", "env://"), rank=rank, world_size=world
)
total = torch.tensor([rank])
dist.all_reduce(total)
print(f"rank {rank} of {world}, local {local}, sum {total.item()}", flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    with shared_folder() as folder:
        yield folder


def result(cwd: Path, which: str = "latest") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((cwd / "runs" / which / "result.json").read_text())
    return found


def script(cwd: Path, text: str) -> str:
    (cwd / "script.py").write_text(text)
    return "script.py"


def test_auto_takes_the_cluster_and_says_so(shared: Path) -> None:
    ran = toolkit(shared, "run", "-N", "2", "--ntasks-per-node", "2", "--", "python3", "-c", SHOW)
    assert ran.returncode == 0, ran.stderr
    assert "running on slurm" in ran.stderr
    assert sorted(ran.stdout.splitlines()) == [f"[rank {n}] {n} 4 node01" for n in range(4)]
    found = result(shared)
    assert (found["target"], found["hosts"]) == ("slurm", ["node01", "node02"])
    assert (shared / "runs/latest/logs/rank-3.log").read_text() == "3 4 node01\n"


FAIL_AT_3 = "[ $RANK = 3 ] && { echo why; exit 3; }; exec sleep 150"


def test_the_first_failing_rank_on_the_second_node(shared: Path) -> None:
    started = time.monotonic()
    ran = toolkit(shared, "run", "-N", "2", "--ntasks-per-node", "2", "--", "sh", "-c", FAIL_AT_3)
    assert ran.returncode == 3, ran.stderr
    assert time.monotonic() - started < 60, "the others would sleep for 150 s"
    assert "rank 3 on node02" in ran.stderr
    assert "| why" in ran.stderr
    failure = result(shared)["failure"]
    assert (failure["origin"], failure["rank"], failure["host"]) == ("workload", 3, "node02")


def test_the_same_through_submit_and_logs(shared: Path) -> None:
    words = ("-N", "2", "--ntasks-per-node", "2", "--", "sh", "-c", FAIL_AT_3)
    submitted = toolkit(shared, "submit", *words)
    assert submitted.returncode == 0, submitted.stderr
    assert Path(submitted.stdout.strip()) == (shared / "runs/latest").resolve()
    followed = toolkit(shared, "logs", "-f")
    assert followed.returncode == 3, followed.stderr
    assert "[rank 3] why" in followed.stdout
    assert "rank 3 on node02" in followed.stderr
    one = toolkit(shared, "logs", "--rank", "3")
    assert "why" in one.stdout
    assert "[rank 0]" not in one.stdout
    status = json.loads(toolkit(shared, "status", "--json").stdout)
    assert (status["state"], status["exit_code"], status["failure"]["rank"]) == ("failed", 3, 3)
    by_job = json.loads(toolkit(shared, "status", "--json", status["job_id"]).stdout)
    assert by_job["run"] == status["run"]


def test_under_torchrun_the_failing_rank_is_named_and_threads_are_shared(shared: Path) -> None:
    # In one write: a torchrun's ranks share its output, line by line at best.
    program = (
        "import os, sys, time; sys.stdout.write(f'threads {os.environ[\"OMP_NUM_THREADS\"]}\\n')"
    )
    program += "; time.sleep(1); sys.exit(3) if os.environ['RANK'] == '3' else time.sleep(150)"
    words = ("-N", "2", "--ntasks-per-node", "2", "-c", "2", "--launcher", "torchrun")
    ran = toolkit(shared, "run", *words, "--", sys.executable, "-c", program)
    assert ran.returncode == 3, ran.stderr
    assert "rank 3 on node02" in ran.stderr
    # Two ranks share the four CPUs of their node's task, or those that this machine really has.
    threads = max(1, min(4, os.cpu_count() or 1) // 2)
    said = {line.rpartition("] ")[2] for line in ran.stdout.splitlines() if "] threads" in line}
    assert said == {f"threads {threads}"}


@pytest.mark.parametrize("how", ["run", "submit"])
def test_a_job_out_of_memory_is_137(shared: Path, how: str) -> None:
    eat = "x = []\nwhile True: x.append(bytearray(1 << 20))"
    ran = toolkit(shared, how, "-N", "1", "--mem", "200M", "--", "python3", "-c", eat)
    if how == "submit":
        assert ran.returncode == 0, ran.stderr
        ran = toolkit(shared, "logs", "-f")
    assert ran.returncode == 137, ran.stderr
    assert "rank 0" in ran.stderr


@pytest.mark.parametrize("how", ["run", "submit"])
def test_a_time_limit_is_124(shared: Path, how: str) -> None:
    ran = toolkit(shared, how, "-N", "2", "-t", "1", "--", "sleep", "300")
    if how == "submit":
        ran = toolkit(shared, "logs", "-f")
    assert ran.returncode == 124, ran.stderr
    assert result(shared)["failure"]["origin"] == "slurm"


def test_a_cancelled_job_is_130_wherever_it_was(shared: Path) -> None:
    toolkit(shared, "submit", "-N", "2", "--", "sh", "-c", "touch started; exec sleep 150")
    wait_for(shared / "started")
    assert toolkit(shared, "cancel").returncode == 0
    assert toolkit(shared, "logs", "-f").returncode == 130
    assert toolkit(shared, "cancel").returncode == 2, "what has ended cannot be cancelled"
    toolkit(shared, "submit", "--hold", "--", "true")
    status = json.loads(toolkit(shared, "status", "--json").stdout)
    assert (status["state"], status["reason"]) == ("pending", "JobHeldUser")
    assert toolkit(shared, "cancel").returncode == 0
    assert toolkit(shared, "logs", "-f").returncode == 130


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_cancels_the_job_on_the_cluster(shared: Path, number: signal.Signals) -> None:
    command = [
        TOOLKIT,
        "run",
        "-N",
        "2",
        "-J",
        "ctrl-c",
        "--",
        "sh",
        "-c",
        "touch started; sleep 150",
    ]
    run = subprocess.Popen(command, cwd=shared, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    wait_for(shared / "started")
    run.send_signal(number)
    run.communicate(timeout=LIMIT)
    assert run.returncode == 130
    deadline = time.monotonic() + 60
    while queued := subprocess.check_output(["squeue", "-h", "-n", "ctrl-c"], text=True):
        assert time.monotonic() < deadline, queued
        time.sleep(0.5)


def test_a_preempted_run_says_run_again(shared: Path) -> None:
    command = [TOOLKIT, "run", "-N", "2", "--", "sh", "-c", "touch started; exec sleep 150"]
    run = subprocess.Popen(command, cwd=shared, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    wait_for(shared / "started")
    urgent = ["srun", "-p", "urgent", "-N2", "--exclusive", "true"]
    subprocess.run(urgent, cwd=shared, timeout=LIMIT, check=True, capture_output=True)
    _, err = run.communicate(timeout=LIMIT)
    assert run.returncode == 75, err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("-p", "nosuch"), "partition"),
        (("-N", "9"), ""),
        (("--gpus-per-node", "99"), ""),
        (("--srun-arg", "--nosuch"), "nosuch"),
    ],
)
def test_what_the_cluster_cannot_do_is_78_and_soon(
    shared: Path, words: tuple[str, ...], says: str
) -> None:
    ran = toolkit(shared, "run", *words, "--", "true")
    assert ran.returncode == 78, ran.stderr
    assert says in ran.stderr
    assert "Traceback" not in ran.stderr


def test_submit_refused_leaves_the_reason(shared: Path) -> None:
    ran = toolkit(shared, "submit", "-p", "nosuch", "--", "true")
    assert ran.returncode == 78
    assert "partition" in ran.stderr


@pytest.mark.parametrize("options", [(), ("--launcher", "torchrun"), ("--rendezvous", "file")])
def test_a_tutorials_script_runs_unmodified(shared: Path, options: tuple[str, ...]) -> None:
    name = script(shared, TUTORIAL)
    words = ("run", "-N", "2", "--ntasks-per-node", "2", *options, "--", sys.executable, name)
    ran = toolkit(shared, *words)
    assert ran.returncode == 0, ran.stderr
    assert all(f"rank {rank} of 4, local {rank % 2}, sum 6" in ran.stdout for rank in range(4))


def test_jobs_and_steps_at_once_do_not_collide(shared: Path) -> None:
    name = script(shared, TUTORIAL)
    words = ["run", "-N", "2", "--ntasks-per-node", "2", "--", sys.executable, name]
    line = f"{TOOLKIT} {' '.join(words)}"
    inside = f"{line} & first=$!; {line} && wait $first"
    commands = ([TOOLKIT, *words], ["salloc", "-N2", "-n4", "bash", "-c", inside])
    runs = [
        subprocess.Popen(
            command, cwd=shared, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for command in commands
    ]
    for run in runs:
        out, err = run.communicate(timeout=LIMIT)
        assert run.returncode == 0, err
        assert "rank 3 of 4, local 1, sum 6" in out


def test_inside_an_allocation_a_run_is_a_step_of_it(shared: Path) -> None:
    show = "echo $RANK/$WORLD_SIZE in $SLURM_JOB_ID"
    inside = (
        f"{TOOLKIT} run --nodes 2 --ntasks-per-node 2 -- sh -c '{show}';"
        f" echo allocation $SLURM_JOB_ID; {TOOLKIT} run -N 3 -- true; echo rc $?;"
        f" {TOOLKIT} submit -- sh -c 'env > seen'; {TOOLKIT} logs -f; echo rc $?"
    )
    command = ["salloc", "-N2", "-n8", "bash", "-c", inside]
    ran = subprocess.run(
        command, cwd=shared, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    lines = ran.stdout.splitlines()
    job = next(line for line in lines if line.startswith("allocation")).split()[1]
    assert sorted(line for line in lines if "/4" in line) == [
        f"[rank {rank}] {rank}/4 in {job}" for rank in range(4)
    ], ran.stderr
    assert "rc 78" in lines
    assert lines[-1] == "rc 0"
    seen = dict(
        line.split("=", 1) for line in (shared / "seen").read_text().splitlines() if "=" in line
    )
    assert seen["SLURM_JOB_ID"] != job
    assert seen["SLURM_NTASKS"] == "1"
    assert seen["SLURM_STEP_NUM_TASKS"] == "1"


def test_an_array_has_a_run_directory_an_element(shared: Path) -> None:
    ran = toolkit(
        shared, "submit", "--array", "1-2", "--", "sh", "-c", "exit $((SLURM_ARRAY_TASK_ID - 1))"
    )
    assert ran.returncode == 0, ran.stderr
    run = Path(ran.stdout.strip()).name
    codes = [toolkit(shared, "logs", "-f", f"{run}_{index}").returncode for index in (1, 2)]
    assert codes == [0, 1]


def test_a_dry_run_does_what_a_run_does(shared: Path) -> None:
    printed = toolkit(
        shared, "run", "-N", "2", "--dry-run", "--", "sh", "-c", 'echo "$RANK of $WORLD_SIZE"'
    )
    assert not (shared / "runs").exists()
    pasted = subprocess.run(
        ["bash", "-c", printed.stdout], capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert pasted.returncode == 0, pasted.stderr
    assert "1: 1 of 2" in pasted.stdout


def test_an_ordinary_user_can_do_it(shared: Path) -> None:
    """With the machine's own Python: a checkout may stand where only root can read."""
    python = next((path for path in ("/usr/bin/python3",) if Path(path).exists()), None)
    if python is None:
        pytest.skip("this machine has no /usr/bin/python3")
    repository = Path(__file__).parents[2]
    site = shared / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", f"--target={site}"]
    install += [f"--constraint={repository / 'constraints.txt'}", str(repository)]
    subprocess.run(install, timeout=LIMIT, check=True)
    shared.chmod(0o777)
    start = f"{python} -c 'from toolkit.cli import main; main()'"
    command = f"cd {shared} && {start} run -N 2 -- id -un && {start} status"
    user = os.environ["TOOLKIT_TESTBED_USER"]
    ran = testbed.run("sh", "-c", command, user=user, PYTHONPATH=str(site))
    assert ran.returncode == 0, ran.stderr
    assert f"[rank 1] {user}" in ran.stdout


def wait_for(path: Path) -> None:
    """Wait until the job has made a file."""
    deadline = time.monotonic() + 90
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.1)
