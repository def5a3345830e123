"""Runs seen later, on one machine: finding one, its state, its logs, ending it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli import TOOLKIT, toolkit
from toolkit import run_dir, runs
from toolkit.entrypoint import processes
from toolkit.errors import UnavailableError, UsageError
from toolkit.run_dir import RunDir
from toolkit.slurm.queue import JobStatus
from toolkit.slurm.sbatch import array_indices

NO_SLURM = {"PATH": "/nonexistent"}


def make(folder: Path, name: str, **record: Any) -> RunDir:
    path = folder / name
    (path / "logs").mkdir(parents=True)
    (path / "ranks").mkdir()
    run = RunDir(path)
    run.update_record(**record)
    return run


def test_a_run_is_found_by_folder_name_job_id_or_as_the_newest(tmp_path: Path) -> None:
    run = make(tmp_path, "a-1", job_id="123")
    make(tmp_path, "a-2", job_id="124_7")
    (tmp_path / "latest").symlink_to("a-2")
    assert run_dir.find(None, tmp_path).path.name == "a-2"
    for which in ("a-1", str(run.path), "123"):
        assert run_dir.find(which, tmp_path).path == run.path
    assert run_dir.find("124_7", tmp_path).path.name == "a-2"
    for which in ("a-3", "12", "../a-1"):
        with pytest.raises(UsageError, match=which):
            run_dir.find(which, tmp_path)


def test_without_runs_that_is_what_is_said(tmp_path: Path) -> None:
    ran = toolkit(tmp_path, "status")
    assert ran.returncode == 2
    assert "no runs" in ran.stderr


def test_status_logs_and_cancel_of_a_local_run(tmp_path: Path) -> None:
    program = "echo hello $RANK; sleep 150"
    start = [TOOLKIT, "run", "--on", "local", "-N", "2", "--", "sh", "-c", program]
    running = subprocess.Popen(
        start, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert running.stdout is not None
    for _ in range(2):
        running.stdout.readline()
    status = json.loads(toolkit(tmp_path, "status", "--json").stdout)
    assert (status["state"], status["exit_code"]) == ("running", None)
    following = subprocess.Popen(
        [TOOLKIT, "logs", "-f"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert toolkit(tmp_path, "logs", "--rank", "1").stdout == "[rank 1] hello 1\n"
    assert toolkit(tmp_path, "logs", "--rank", "2").returncode == 2
    assert toolkit(tmp_path, "cancel").returncode == 0
    running.communicate(timeout=60)
    assert running.returncode == 130
    out, _ = following.communicate(timeout=60)
    assert following.returncode == 130
    assert sorted(out.splitlines()) == ["[rank 0] hello 0", "[rank 1] hello 1"]
    assert json.loads(toolkit(tmp_path, "status", "--json").stdout)["exit_code"] == 130
    assert toolkit(tmp_path, "cancel").returncode == 2, "what has ended cannot be cancelled"


def test_a_run_that_left_no_record_is_unknown_and_not_waited_for(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    started = {**processes.identify(os.getpid()), "pid": ended.pid}
    run = make(tmp_path, "a", target="local", world_size=1, **started)
    assert runs.status(run, NO_SLURM)["state"] == "unknown"
    assert toolkit(tmp_path, "logs", "-f", str(run.path)).returncode == 1
    with pytest.raises(UnavailableError, match="does not run here"):
        runs.cancel(run, NO_SLURM, print)


def test_a_run_on_another_machine_is_not_signalled_here(tmp_path: Path) -> None:
    run = make(tmp_path, "a", target="local", host="elsewhere", pid=os.getpid())
    with pytest.raises(UnavailableError, match="elsewhere"):
        runs.cancel(run, NO_SLURM, print)


def test_a_process_that_has_the_runs_number_now_is_left_alone(tmp_path: Path) -> None:
    """Numbers come round again, and mean somebody else in a container or after a reboot."""
    with subprocess.Popen(["sleep", "100"]) as other:
        now = processes.identify(other.pid)
        for changed in ({"start": "1"}, {"boot": "another"}, {"space": "pid:[1]"}, {"host": "x"}):
            name = next(iter(changed))
            run = make(tmp_path, name, target="local", world_size=1, **{**now, **changed})
            assert runs.status(run, NO_SLURM)["state"] == "unknown"
            with pytest.raises(UnavailableError, match="does not run here"):
                runs.cancel(run, NO_SLURM, print)
        old = make(tmp_path, "old", target="local", host=now["host"], pid=other.pid)
        with pytest.raises(UnavailableError, match="does not run here"):
            runs.cancel(old, NO_SLURM, print)
        assert other.poll() is None
        mine = make(tmp_path, "mine", target="local", world_size=1, **now)
        assert runs.status(mine, NO_SLURM)["state"] == "running"
        runs.cancel(mine, NO_SLURM, print)
        assert other.wait(timeout=30) == -signal.SIGTERM


def test_a_pasted_plan_is_a_run_like_any_other_while_it_runs(tmp_path: Path) -> None:
    command = ("sh", "-c", "echo $$ >pid-$RANK; exec sleep 150")
    plan = toolkit(tmp_path, "run", "--on", "local", "-N", "2", "--dry-run", "--", *command).stdout
    files = [tmp_path / "pid-0", tmp_path / "pid-1"]
    with subprocess.Popen(
        ["bash"], stdin=subprocess.PIPE, cwd=tmp_path, stderr=subprocess.DEVNULL
    ) as pasted:
        assert pasted.stdin is not None
        pasted.stdin.write(plan.encode())
        pasted.stdin.close()
        deadline = time.monotonic() + 60
        while not all(file.exists() and file.read_text().strip() for file in files):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert json.loads(toolkit(tmp_path, "status", "--json").stdout)["state"] == "running"
        assert toolkit(tmp_path, "cancel").returncode == 0
        pasted.wait(timeout=60)
    deadline = time.monotonic() + 30
    while any(processes.identify(int(file.read_text()))["start"] for file in files):
        assert time.monotonic() < deadline, "no rank is left"
        time.sleep(0.05)
    assert json.loads(toolkit(tmp_path, "status", "--json").stdout)["state"] == "unknown"


@pytest.mark.parametrize(
    ("state", "exit_code", "messages", "code", "rank"),
    [
        ("FAILED", 143, "srun: error: node02: task 1: Exited with exit code 3\n", 3, 1),
        ("TIMEOUT", 0, "srun: error: node02: task 1: Terminated\n", 124, None),
        ("OUT_OF_MEMORY", 0, "srun: error: node02: task 1: Out Of Memory\n", 137, None),
        ("NODE_FAIL", 1, "", 75, None),
        ("CANCELLED", 0, "", 130, None),
        ("COMPLETED", 0, "", 0, None),
    ],
)
def test_a_job_that_could_not_write_its_result_gets_one(
    tmp_path: Path, state: str, exit_code: int, messages: str, code: int, rank: int | None
) -> None:
    run = make(tmp_path, "a", target="slurm", world_size=2, num_nodes=2, job_id="9")
    (run.path / "ranks/1.json").write_text(
        json.dumps({"rank": 1, "local_rank": 0, "host": "node02", "started": time.time()})
    )
    (run.path / "logs/srun.log").write_text(messages)
    result = runs.rebuild(run, JobStatus("9", state, exit_code=exit_code, source="sacct"))
    assert result["exit_code"] == code
    assert (result["failure"] or {}).get("rank") == rank
    assert run.result() == result


@pytest.mark.parametrize(
    ("text", "indices"),
    [
        ("3", [3]),
        ("0-3", [0, 1, 2, 3]),
        ("1,5,2", [1, 5, 2]),
        ("0-9:4%2", [0, 4, 8]),
        ("1-2,2-3", [1, 2, 3]),
    ],
)
def test_array_task_ids_are_read_as_sbatch_reads_them(text: str, indices: list[int]) -> None:
    assert array_indices(text) == indices


@pytest.mark.parametrize("text", ["", "a", "1-", "3-1", "1-9:0", "1%", "1-2%x", "-1", "0-99999999"])
def test_other_arrays_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--array"):
        array_indices(text)
