"""``toolkit run`` on this machine, for real: every test starts processes as a user would."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from tests.cli import TOOLKIT, toolkit

SHOW = (
    "import os; print(*(os.environ[k] for k in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'NODE_RANK')))"
)


def result(cwd: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((cwd / "runs/latest/result.json").read_text())
    return found


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_ranks_of_two_nodes_resolve_and_are_logged(tmp_path: Path) -> None:
    ran = toolkit(tmp_path, "run", "-N", "2", "--ntasks-per-node", "2", "--", "python3", "-c", SHOW)
    assert ran.returncode == 0, ran.stderr
    assert sorted(ran.stdout.splitlines()) == [
        "[rank 0] 0 4 0 0",
        "[rank 1] 1 4 1 0",
        "[rank 2] 2 4 0 1",
        "[rank 3] 3 4 1 1",
    ]
    assert (tmp_path / "runs/latest/logs/rank-2.log").read_text() == "2 4 0 1\n"
    found = result(tmp_path)
    assert (found["exit_code"], found["world_size"], found["num_nodes"]) == (0, 4, 2)
    assert found["failure"] is None
    assert len(found["hosts"]) == 2


def test_case_10_4_the_first_failing_rank_ends_the_run_with_its_own_code(tmp_path: Path) -> None:
    program = "import os, sys, time\nif os.environ['RANK'] == '1': print('why'); sys.exit(3)\n"
    program += "open('pid', 'w').write(str(os.getpid())); time.sleep(300)"
    started = time.monotonic()
    ran = toolkit(tmp_path, "run", "-N", "2", "--", "python3", "-c", program)
    assert ran.returncode == 3
    assert time.monotonic() - started < 60, "the other rank would sleep for 300 s"
    assert "rank 1" in ran.stderr
    assert "| why" in ran.stderr
    failure = result(tmp_path)["failure"]
    assert (failure["rank"], failure["exit_code"], failure["origin"]) == (1, 3, "workload")
    assert failure["last_lines"] == ["why"]
    pid = tmp_path / "pid"
    assert not pid.exists() or not alive(int(pid.read_text()))


def test_a_rank_that_ignores_sigterm_is_killed_with_its_children(tmp_path: Path) -> None:
    program = (
        "trap '' TERM; sleep 300 & echo $! > child; echo $$ > self;"
        " if [ $RANK = 1 ]; then while [ ! -s self ]; do sleep 0.05; done; exit 5; fi; wait"
    )
    ran = toolkit(tmp_path, "run", "-N", "2", "--", "bash", "-c", program)
    assert ran.returncode == 5
    for name in ("child", "self"):
        assert not alive(int((tmp_path / name).read_text()))


def test_a_rank_killed_by_a_signal_gives_128_plus_n(tmp_path: Path) -> None:
    ran = toolkit(tmp_path, "run", "--", "sh", "-c", "kill -KILL $$")
    assert ran.returncode == 137
    assert "SIGKILL" in ran.stderr


def test_what_the_entrypoint_refuses_is_the_toolkits_failure(tmp_path: Path) -> None:
    ran = toolkit(tmp_path, "run", "--", "true", MASTER_PORT="no")
    assert ran.returncode == 71
    assert result(tmp_path)["failure"]["origin"] == "toolkit"
    assert "rank 0" in ran.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_cancelling_ends_every_rank(tmp_path: Path, number: signal.Signals) -> None:
    command = [TOOLKIT, "run", "-N", "2", "--", "sh", "-c", "echo $$ > pid-$RANK; exec sleep 300"]
    run = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    files = [tmp_path / "pid-0", tmp_path / "pid-1"]
    deadline = time.monotonic() + 60
    while not all(file.exists() and file.read_text().strip() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    run.send_signal(number)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 130, err
    assert not any(alive(int(file.read_text())) for file in files)
    assert result(tmp_path)["exit_code"] == 130


def test_a_time_limit_ends_the_run_with_124(tmp_path: Path) -> None:
    ran = toolkit(tmp_path, "run", "-t", "0:01", "--", "sleep", "300")
    assert ran.returncode == 124
    assert "time limit" in ran.stderr


def test_json_is_all_that_stands_on_stdout(tmp_path: Path) -> None:
    report = """import json, os; line = json.dumps({"loss": 0.5, "epoch": 1})
open(os.environ["TOOLKIT_RUN_DIR"] + "/metrics.jsonl", "a").write(line + "\\n{half")"""
    ran = toolkit(tmp_path, "run", "--json", "--", "python3", "-c", f"print('out'); {report}")
    found = json.loads(ran.stdout)
    assert found["metrics"] == {"loss": 0.5, "epoch": 1}
    assert found == result(tmp_path)
    assert "[rank 0] out" in ran.stderr


def test_arguments_and_variables_arrive_byte_for_byte(tmp_path: Path) -> None:
    words = ["", "a b", "$HOME", "`x`", "it's", '"q"', "*", "--", "-N", "a\nb", ":", "é"]
    show = "import os, sys; print(ascii((sys.argv[1:], os.environ['NOTE'])))"
    note = "it's $5; ok, =x"
    ran = toolkit(tmp_path, "run", "--env", f"NOTE={note}", "--", "python3", "-c", show, *words)
    assert ran.stdout == f"[rank 0] {(words, note)!a}\n"


def test_a_dry_run_prints_what_a_run_does_and_makes_nothing(tmp_path: Path) -> None:
    words = (
        "run",
        "-N",
        "2",
        "-J",
        "x",
        "--dry-run",
        "--",
        "sh",
        "-c",
        "echo $RANK; exit $((RANK*3))",
    )
    printed = toolkit(tmp_path, *words)
    assert printed.returncode == 0
    assert not (tmp_path / "runs").exists()
    pasted = subprocess.run(
        ["bash", "-c", printed.stdout],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert pasted.returncode == 3, pasted.stderr
    assert "[rank 1] 1" in pasted.stdout
    assert (tmp_path / "runs/latest/logs/rank-1.log").read_text() == "1\n"
    again = subprocess.run(
        ["bash", "-c", printed.stdout], capture_output=True, timeout=60, check=False
    )
    assert again.returncode == 2, "a plan that was run is not run over its own results"


@pytest.mark.skipif(which("shellcheck") is None, reason="shellcheck is not installed")
def test_a_dry_run_passes_shellcheck(tmp_path: Path) -> None:
    printed = toolkit(
        tmp_path, "run", "-N", "2", "--dry-run", "--env", "A=it's", "--", "echo", "$A"
    )
    checked = subprocess.run(
        ["shellcheck", "-"], input=printed.stdout, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout


def test_nothing_in_the_users_folder_breaks_the_start(tmp_path: Path) -> None:
    for name in ("toolkit", "json", "workloads"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the wrong module')")
    ran = toolkit(tmp_path, "run", "--", "true")
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("sagee",), "did you mean 'sage'"),
        (("python", "train.py"), "after --"),
        (("--nodes", "0", "sage"), "--nodes 0"),
        (("--node", "2"), "--node"),
        (("--on", "mars"), "--on mars"),
        (("--env", "TOKEN_NOT_SET", "--", "true"), "TOKEN_NOT_SET"),
        (("--runs", "/proc/none", "--", "true"), "/proc/none"),
    ],
)
def test_bad_input_is_one_paragraph_and_leaves_nothing(
    tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    ran = toolkit(tmp_path, "run", *words)
    assert ran.returncode == 2
    assert says in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not list(tmp_path.glob("runs/*"))


def test_two_runs_of_one_second_get_two_folders(tmp_path: Path) -> None:
    command = [TOOLKIT, "run", "-J", "x", "--", "true"]
    runs = [subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL) for _ in range(4)]
    assert [run.wait(timeout=60) for run in runs] == [0, 0, 0, 0]
    folders = [path for path in (tmp_path / "runs").iterdir() if not path.is_symlink()]
    assert len(folders) == 4
    assert (tmp_path / "runs/latest").resolve() in {folder.resolve() for folder in folders}


@pytest.mark.parametrize("words", [("--help",), ("run", "--dry-run", "--", "true")])
def test_nothing_heavy_is_imported(tmp_path: Path, words: tuple[str, ...]) -> None:
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", TOOLKIT, *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    imported = {
        line.rpartition("|")[2].strip().partition(".")[0] for line in ran.stderr.splitlines()
    }
    assert "typer" in imported
    assert not imported & {"torch", "docker", "rich", "pydantic", "numpy", "requests"}
