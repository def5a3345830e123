"""A run goes on, within its limits, whatever becomes of the one who looks on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.cli import TOOLKIT, toolkit
from toolkit.entrypoint import processes

if TYPE_CHECKING:
    from pathlib import Path

LIMIT = 60


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + LIMIT
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.05)


def begin(folder: Path, *words: str, **more: Any) -> subprocess.Popen[bytes]:
    command = [TOOLKIT, "run", "--on", "local", *words]
    return subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL, **more)


def result(folder: Path) -> dict[str, Any]:
    wait_for(folder / "runs/latest/result.json")
    found: dict[str, Any] = json.loads((folder / "runs/latest/result.json").read_text())
    return found


def status(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(toolkit(folder, "status", "--json").stdout)
    return found


def gone(folder: Path) -> bool:
    """Whether no rank of the newest run lives."""
    records = [json.loads(file.read_text()) for file in folder.glob("runs/latest/ranks/*.json")]
    assert records
    return not any(processes.lives(record) for record in records)


PRINTS = "i=0; while [ $i -lt 20000 ]; do echo line $i; i=$((i+1)); done; touch done"


def test_a_closed_pipe_ends_no_rank(tmp_path: Path) -> None:
    line = f"{TOOLKIT} run --on local -- sh -c '{PRINTS}' | head -3"
    ran = subprocess.run(
        ["bash", "-c", line],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=True,
    )
    assert ran.stdout == "[rank 0] line 0\n[rank 0] line 1\n[rank 0] line 2\n"
    assert "the run goes on" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert (result(tmp_path)["exit_code"], (tmp_path / "done").exists()) == (0, True)


def test_a_reader_that_has_stopped_stops_no_rank(tmp_path: Path) -> None:
    with begin(tmp_path, "--", "sh", "-c", PRINTS, stdout=subprocess.PIPE) as run:
        assert result(tmp_path)["exit_code"] == 0
        assert run.stdout is not None
        assert b"line 19999" in run.stdout.read()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_run_outlives_who_looks_on_and_is_still_reached(
    tmp_path: Path, number: signal.Signals
) -> None:
    words = ("-N", "2", "--", "sh", "-c", "echo hello $RANK; touch up-$RANK; sleep 150")
    with begin(tmp_path, *words, stdout=subprocess.DEVNULL) as front:
        for rank in (0, 1):
            wait_for(tmp_path / f"up-{rank}")
        front.send_signal(number)
        assert status(tmp_path)["state"] == "running"
        follow = subprocess.Popen(
            [TOOLKIT, "logs", "-f"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
        )
        assert toolkit(tmp_path, "cancel").returncode == 0
        shown, _ = follow.communicate(timeout=LIMIT)
        front.kill()
    assert follow.returncode == 130
    assert sorted(shown.splitlines()) == ["[rank 0] hello 0", "[rank 1] hello 1"]
    assert (status(tmp_path)["state"], status(tmp_path)["exit_code"]) == ("cancelled", 130)
    assert gone(tmp_path)


def test_its_time_limit_outlives_who_looks_on(tmp_path: Path) -> None:
    words = ("-t", "0:03", "--", "sh", "-c", "touch up; sleep 150")
    with begin(tmp_path, *words, stdout=subprocess.DEVNULL) as front:
        wait_for(tmp_path / "up")
        front.kill()
    assert (result(tmp_path)["exit_code"], result(tmp_path)["state"]) == (124, "timeout")
    assert gone(tmp_path)


def test_ranks_that_nothing_watches_any_more_are_found_and_ended(tmp_path: Path) -> None:
    words = ("-N", "2", "--", "sh", "-c", "touch up-$RANK; sleep 150")
    with begin(tmp_path, *words, stdout=subprocess.DEVNULL) as front:
        for rank in (0, 1):
            wait_for(tmp_path / f"up-{rank}")
        keeper = json.loads((tmp_path / "runs/latest/run.json").read_text())["pid"]
        assert keeper != front.pid
        os.kill(keeper, signal.SIGKILL)
        assert front.wait(LIMIT) == 70
    shown = status(tmp_path)
    assert (shown["state"], shown["reason"]) == ("running", "nothing watches it any more")
    assert toolkit(tmp_path, "cancel").returncode == 0
    assert gone(tmp_path)
    assert (status(tmp_path)["state"], status(tmp_path)["exit_code"]) == ("cancelled", 130)


SAVES = """\
import signal, sys, time
def save(*_):
    time.sleep(4)
    open("saved", "w").write("all of it")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
open("up", "w")
time.sleep(150)
"""


@pytest.mark.parametrize("how", ["signal", "cancel"])
def test_who_listens_has_the_grace_to_save_and_was_cancelled_all_the_same(
    tmp_path: Path, how: str
) -> None:
    with begin(tmp_path, "--", sys.executable, "-c", SAVES, stdout=subprocess.DEVNULL) as front:
        wait_for(tmp_path / "up")
        if how == "signal":
            front.send_signal(signal.SIGINT)
        else:
            assert toolkit(tmp_path, "cancel").returncode == 0
        assert front.wait(LIMIT) == 130
    assert (tmp_path / "saved").read_text() == "all of it"
    assert result(tmp_path)["state"] == "cancelled"


def test_a_childs_handler_has_the_grace_too(tmp_path: Path) -> None:
    (tmp_path / "save.py").write_text(SAVES)
    shell = f"{sys.executable} save.py; true"
    with begin(tmp_path, "--", "sh", "-c", shell, stdout=subprocess.DEVNULL) as front:
        wait_for(tmp_path / "up")
        front.send_signal(signal.SIGTERM)
        assert front.wait(LIMIT) == 130
    assert (tmp_path / "saved").exists()


def test_the_grace_ends_and_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    deaf = "trap : TERM; touch up; while :; do sleep 1; done"
    for words, signals in ((("--grace", "3"), 1), (("--grace", "600"), 2)):
        (tmp_path / "up").unlink(missing_ok=True)
        with begin(tmp_path, *words, "--", "sh", "-c", deaf, stdout=subprocess.DEVNULL) as front:
            wait_for(tmp_path / "up")
            for _ in range(signals):
                front.send_signal(signal.SIGINT)
                time.sleep(0.5)
            assert front.wait(LIMIT) == 130
        assert gone(tmp_path)


def test_the_run_folder_is_named_at_the_start(tmp_path: Path) -> None:
    command = [TOOLKIT, "run", "--on", "local", "--", "sleep", "150"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None
        said = [run.stderr.readline() for _ in range(2)]
        run.terminate()
    assert f"run directory: {(tmp_path / 'runs/latest').resolve()}\n" in said[1]
