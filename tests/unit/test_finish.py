"""How a run ended, from what srun printed. The texts are what 22.05.8 and 24.11.5 print."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from toolkit import pyz
from toolkit.entrypoint import finish

CANCELLED = "slurmstepd-node01: error: *** STEP 2.0 ON node01 CANCELLED AT 2026-11-30T22:09:00"
KILLED_PEERS = f"""\
srun: launch/slurm: _step_signal: Terminating StepId=2.0
{CANCELLED} ***
srun: error: node02: task 2: Terminated
srun: error: node01: tasks 0-1: Terminated
srun: Force Terminated StepId=2.0"""


def failure(text: str, started: bool = True) -> dict[str, object]:
    found = finish.first_failure(text.splitlines(), lambda _rank: started)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("text", "rank", "code"),
    [
        (f"srun: error: node02: task 3: Exited with exit code 3\n{KILLED_PEERS}", 3, 3),
        (f"srun: error: node02: tasks 2-3: Exited with exit code 5\n{KILLED_PEERS}", 2, 5),
        (f"srun: error: node02: tasks 1,3: Exited with exit code 5\n{KILLED_PEERS}", 1, 5),
        (f"srun: error: node02: task 1: Killed\n{KILLED_PEERS}", 1, 137),
        (f"srun: error: node02: task 1: Segmentation fault (core dumped)\n{KILLED_PEERS}", 1, 139),
        (f"srun: error: node02: task 1: Aborted\n{KILLED_PEERS}", 1, 134),
        (f"srun: error: node02: task 1: Out Of Memory\n{KILLED_PEERS}", 1, 137),
        (
            """srun: error: node02: task 1: Killed
            slurmstepd-node02: error: Detected 1 oom-kill event(s) in StepId=2.0.""",
            1,
            137,
        ),
        (
            """slurmstepd-node02: error: StepId=2.0 exceeded memory limit (9 > 8), being killed
            srun: Exceeded job memory limit
            srun: error: node02: task 1: Killed""",
            1,
            137,
        ),
    ],
)
def test_the_first_failing_rank_counts_and_not_those_it_took_along(
    text: str, rank: int, code: int
) -> None:
    found = failure(text)
    assert (found["origin"], found["rank"], found["exit_code"]) == ("workload", rank, code)
    assert str(found["host"]) == "node02"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (f"{CANCELLED} DUE TO TIME LIMIT ***\nsrun: error: node02: task 1: Terminated", 124),
        (f"{CANCELLED} ***\nsrun: error: node02: task 1: Terminated", 130),
        (f"{CANCELLED} DUE TO PREEMPTION ***\nsrun: error: node02: task 1: Terminated", 75),
        (f"{CANCELLED} DUE TO NODE FAILURE, SEE SLURMCTLD LOG ***", 75),
        ("srun: error: Node failure on node02\nsrun: error: node01: task 0: Terminated", 75),
        ("slurmstepd: error: *** JOB 9 ON n1 CANCELLED AT 2026-11-30T22:09:00 ***", 130),
        ("srun: error: Unable to allocate resources: Invalid partition name specified", 78),
        (
            """srun: Job has been cancelled
            srun: error: Unable to allocate resources: Job/step already completing or completed""",
            130,
        ),
        ("srun: fatal: Could not establish a configuration source", 78),
        ("srun: error: Application launch failed: Unspecified error\nsrun: Job step aborted", 78),
    ],
)
def test_what_slurm_ended_is_slurms(text: str, code: int) -> None:
    found = failure(text)
    assert (found["origin"], found["rank"], found["exit_code"]) == ("slurm", None, code)


def test_a_container_that_did_not_start_is_told_from_a_program_that_failed() -> None:
    text = """\
slurmstepd-node01: error: pyxis: container start failed with error code: 1
slurmstepd-node01: error: pyxis: printing enroot log file:
slurmstepd-node01: error: pyxis:     [ERROR] Invalid argument: /images/none.sqsh
slurmstepd-node01: error: spank: required plugin spank_pyxis.so: task_init() failed with rc=-1
srun: error: node01: task 0: Exited with exit code 1"""
    found = failure(text, started=False)
    assert (found["origin"], found["exit_code"]) == ("slurm", 78)
    assert found["reason"] == "did not start: Invalid argument: /images/none.sqsh"
    assert failure(text, started=True)["exit_code"] == 1


def test_a_rank_without_a_record_was_stopped_by_the_entrypoint() -> None:
    text = "srun: error: node01: task 0: Exited with exit code 76"
    assert failure(text, started=False)["origin"] == "toolkit"


def test_nothing_wrong_is_none() -> None:
    lines = ["srun: job 3 queued and waiting for resources", "srun: job 3 has been allocated"]
    assert finish.first_failure(lines, lambda _rank: True) is None


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for name in ("logs", "ranks"):
        (tmp_path / name).mkdir()
    record = {"target": "slurm", "world_size": 2, "num_nodes": 2}
    (tmp_path / "run.json").write_text(json.dumps(record))
    for rank, host in enumerate(("node01", "node02")):
        world = {"rank": rank, "local_rank": 0, "host": host, "started": 10.0 + rank}
        (tmp_path / f"ranks/{rank}.json").write_text(json.dumps(world))
        (tmp_path / f"logs/rank-{rank}.log").write_text(f"hello {rank}\n")
    (tmp_path / "metrics.jsonl").write_text('{"loss": 2, "epoch": 1}\n{"loss": 1}\nnot json\n{"ha')
    return tmp_path


def packed(run: Path, code: int) -> subprocess.CompletedProcess[str]:
    pyz.write_entrypoint(run / "entrypoint.pyz")
    command = [sys.executable, "-I", "-S", "entrypoint.pyz", "--finish", str(run), str(code)]
    return subprocess.run(command, cwd=run, capture_output=True, text=True, timeout=60, check=False)


def test_a_batch_script_ends_with_the_first_failing_ranks_code(run: Path) -> None:
    (run / "logs/srun.log").write_text(
        f"srun: error: node02: task 1: Exited with exit code 3\n{KILLED_PEERS}\n"
    )
    ended = packed(run, 143)
    assert ended.returncode == 3, ended.stderr
    result = json.loads((run / "result.json").read_text())
    assert result["exit_code"] == 3
    assert result["hosts"] == ["node01", "node02"]
    assert result["started"] == 10.0
    assert result["metrics"] == {"loss": 1, "epoch": 1}
    assert (result["failure"]["rank"], result["failure"]["last_lines"]) == (1, ["hello 1"])


def test_the_end_of_a_step_is_found_behind_a_ranks_label(run: Path) -> None:
    (run / "logs/srun.log").write_text(f"0: {CANCELLED} DUE TO TIME LIMIT ***\n")
    assert packed(run, 143).returncode == 124


def test_a_rank_that_died_with_its_job_did_not_fail_by_itself(run: Path) -> None:
    killed = "srun: error: node02: task 1: Terminated"
    (run / "logs/srun.log").write_text(f"{killed}\n0: {CANCELLED} DUE TO TIME LIMIT ***\n")
    assert packed(run, 143).returncode == 124
    ended = "slurmstepd: error: *** JOB 9 ON node01 CANCELLED AT 2026-11-30T22:09:00 ***"
    (run / "logs/srun.log").write_text(f"{killed}\n{ended}\n")
    assert packed(run, 143).returncode == 130
    (run / "logs/srun.log").write_text("srun: error: node02: task 1: Exited with exit code 3\n")
    assert packed(run, 143).returncode == 3, "a rank's own exit code is its own"


def test_a_run_directory_that_a_node_does_not_see_is_named(run: Path) -> None:
    (run / "ranks/1.json").unlink()
    (run / "logs/rank-1.log").write_text("python3: can't open file '/x/entrypoint.pyz': [Errno 2]")
    (run / "logs/srun.log").write_text("srun: error: node02: task 1: Exited with exit code 2\n")
    assert packed(run, 2).returncode == 78
    assert str(run) in json.loads((run / "result.json").read_text())["failure"]["reason"]


def test_a_rank_that_died_of_the_warning_before_the_limit_reached_the_limit(run: Path) -> None:
    (run / "logs/srun.log").write_text("srun: error: node02: task 1: Terminated\n")
    record = {"world_size": 2, "num_nodes": 2, "job": {"time": 1800, "signal": "TERM@120"}}
    (run / "run.json").write_text(json.dumps(record))
    for rank, age in ((0, 1700), (1, 1690)):
        world = {"rank": rank, "local_rank": 0, "host": "n", "started": time.time() - age}
        (run / f"ranks/{rank}.json").write_text(json.dumps(world))
    assert packed(run, 143).returncode == 124
    record["job"] = {"time": 18000, "signal": "TERM@120"}
    (run / "run.json").write_text(json.dumps(record))
    assert packed(run, 143).returncode == 143, "long before the limit it died of something else"


TORCHRUN = """\
hello 3
W1130 22:51:04.956000 1634 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process
E1130 22:51:04.957000 1634 torch/distributed/elastic/multiprocessing/api.py:1002] failed
Failures:
[1]:
  host      : node02
  rank      : 2 (local_rank: 0)
  exitcode  : -15 (pid: 1637)  (SIGTERM)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-30_22:51:04
  host      : node02
  rank      : 3 (local_rank: 1)
  exitcode  : {} (pid: 1638)
============================================================
"""


@pytest.mark.parametrize(("said", "code"), [("3", 3), ("-9", 137)])
def test_under_torchrun_its_report_names_the_rank(run: Path, said: str, code: int) -> None:
    record = {"world_size": 4, "num_nodes": 2, "job": {"launcher": "torchrun"}}
    (run / "run.json").write_text(json.dumps(record))
    (run / "logs/node-1.log").write_text(TORCHRUN.format(said))
    (run / "logs/srun.log").write_text("srun: error: node02: task 1: Exited with exit code 1\n")
    assert packed(run, 1).returncode == code
    failed = json.loads((run / "result.json").read_text())["failure"]
    assert (failed["rank"], failed["host"], failed["last_lines"]) == (3, "node02", ["hello 3"])


def test_success_is_recorded_too(run: Path) -> None:
    assert packed(run, 0).returncode == 0
    assert json.loads((run / "result.json").read_text())["failure"] is None


@pytest.mark.parametrize(("code", "shown"), [(143, 143), (1, 78), (255, 78)])
def test_an_end_that_nothing_explains_is_not_a_success(run: Path, code: int, shown: int) -> None:
    assert packed(run, code).returncode == shown
    assert json.loads((run / "result.json").read_text())["failure"]["origin"] == "slurm"
