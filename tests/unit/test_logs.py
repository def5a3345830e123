"""What a run's logs show: whole lines, attempts, and what srun passed on."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from toolkit.entrypoint.finish import write_json
from toolkit.errors import UsageError
from toolkit.logs import Logs
from toolkit.run_dir import RunDir

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "logs").mkdir()
    write_json(str(tmp_path / "run.json"), {"world_size": 2, "num_nodes": 1})
    return RunDir(tmp_path)


def append(run: RunDir, name: str, text: str) -> None:
    with (run.path / "logs" / name).open("a", newline="") as log:
        log.write(text)


def test_a_line_is_shown_once_and_whole(run: RunDir) -> None:
    logs = Logs(run)
    assert list(logs.lines()) == []
    append(run, "rank-1.log", "one\nhal")
    assert list(logs.lines()) == [("rank 1", "one")]
    append(run, "rank-1.log", "f\n\nlast")
    assert list(logs.lines()) == [("rank 1", "half"), ("rank 1", "")]
    assert list(logs.lines(ended=True)) == [("rank 1", "last")]
    assert list(logs.lines(ended=True)) == []


def test_of_a_progress_bar_its_end_is_shown(run: RunDir) -> None:
    logs = Logs(run)
    append(run, "rank-0.log", "\r 10%\r 50%")
    assert list(logs.lines()) == []
    append(run, "rank-0.log", "\r100%\r\n")
    assert list(logs.lines()) == [("rank 0", "100%")]


def test_what_srun_passed_on_is_the_ranks_and_what_it_said_is_its_own(run: RunDir) -> None:
    append(
        run,
        "srun.log",
        "toolkit: job 9, restart 0, on node01\n"
        "1: python3: can't open file\n"
        "0: slurmstepd: error: *** STEP 9.0 ON node01 CANCELLED AT 2026-12-04T10:00:00 ***\n"
        "srun: error: node01: tasks 0-1: Terminated\n",
    )
    assert list(Logs(run).lines()) == [
        ("srun", "toolkit: job 9, restart 0, on node01"),
        ("rank 1", "python3: can't open file"),
    ], "how it ended is told by the result"
    assert list(Logs(run, rank=1).lines()) == []
    with pytest.raises(UsageError, match="--rank 2"):
        Logs(run, rank=2)


def again(run: RunDir, restart: int) -> None:
    """What a batch script does when its job begins anew."""
    before = run.path / f"before-restart-{restart}"
    before.mkdir()
    for log in (run.path / "logs").glob("rank-*.log"):
        shutil.move(log, before)
    shutil.copy(run.path / "logs/srun.log", before)
    (run.path / "logs/srun.log").write_text("")


def test_every_attempt_is_shown_whole_to_who_followed_from_before(run: RunDir) -> None:
    logs = Logs(run)
    append(run, "srun.log", "restart 0\n")
    append(run, "rank-0.log", "first\n")
    shown = list(logs.lines())
    append(run, "rank-0.log", "first again\nits last half")
    again(run, 1)
    append(run, "rank-0.log", "second\n")
    append(run, "srun.log", "restart 1\n")
    shown += logs.lines()
    begins = ("toolkit", f"attempt 2 of {run.path.name} begins")
    assert shown == [
        ("srun", "restart 0"),
        ("rank 0", "first"),
        ("rank 0", "first again"),
        ("rank 0", "its last half"),
        begins,
        ("srun", "restart 1"),
        ("rank 0", "second"),
    ]
    assert list(Logs(run).lines()) == shown, "and to who looks later"


def test_of_several_runs_each_line_says_whose_it_is(run: RunDir) -> None:
    append(run, "rank-0.log", "x\n")
    assert list(Logs(run, name="a_1").lines()) == [("a_1 rank 0", "x")]
