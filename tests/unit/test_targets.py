"""What holds for every target: check, plan, run, cancel, and a result on every way out."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.cli import TOOLKIT, toolkit
from tests.jobs import decided
from toolkit import launch, targets
from toolkit.commands.display import PlainRun
from toolkit.errors import ToolkitError, UnavailableError
from toolkit.options import TARGETS
from toolkit.targets import local

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from toolkit.job import Job
    from toolkit.launch import View
    from toolkit.plan import Outcome, Plan

IMAGE = "ubuntu:24.04"
#: Where the target cannot be had, and what is said then.
NOWHERE = {
    "local": ({"PATH": "/usr/bin:/bin"}, ["sage"], "needs torch"),
    "slurm": ({"PATH": "/nonexistent"}, ["--", "true"], "srun is not on PATH"),
    "docker": ({"DOCKER_HOST": "unix:///none.sock"}, ["--", "true"], "no container engine"),
}


def job_of(target: str, folder: Path, **options: Any) -> Job:
    image = {} if target == "local" else {"container_image": IMAGE}
    where: dict[str, Any] = {"cwd": folder, "run_dir": folder / "runs" / "x"}
    given = {"command": ("true",), **image, **options}
    job = decided(dict(os.environ), target=target, python=sys.executable, **where, **given)
    record = {"target": target, "world_size": 1, "num_nodes": 1, "job": job.spec.as_dict()}
    return dataclasses.replace(job, record=record)


@contextlib.contextmanager
def view() -> Iterator[View]:
    yield PlainRun(io.StringIO())


@pytest.mark.parametrize("name", TARGETS)
def test_it_has_the_same_few_functions(name: str) -> None:
    module: Any = targets.load(name)
    for function in ("check", "plan", "run"):
        wanted = list(inspect.signature(getattr(targets.Target, function)).parameters)[1:]
        found = inspect.signature(getattr(module, function)).parameters.values()
        needed = [one.name for one in found if one.default is inspect.Parameter.empty]
        assert needed == wanted, function


@pytest.mark.parametrize("name", TARGETS)
def test_a_plan_is_data_and_makes_nothing(name: str, tmp_path: Path) -> None:
    plan = targets.load(name).plan(job_of(name, tmp_path, nodes=2, ntasks_per_node=2))
    assert plan.processes
    assert all(process.argv for process in plan.processes)
    assert "true" in plan.script()
    assert str(tmp_path / "runs" / "x") in plan.script()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["slurm", "docker"])
def test_what_cannot_run_here_is_refused_before_anything_is_made(name: str, tmp_path: Path) -> None:
    environ, words, says = NOWHERE[name]
    (tmp_path / "docker").write_text("#!/bin/sh\n")
    (tmp_path / "docker").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **environ}
    ran = toolkit(tmp_path, "run", "--on", name, "--image", IMAGE, *words, **environ)
    assert (ran.returncode, ran.stdout) == (78, "")
    assert says in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not (tmp_path / "runs").exists()
    if name == "docker":
        smoke = toolkit(tmp_path, "smoke", IMAGE, **environ)
        assert ran.stderr.splitlines()[-1] == smoke.stderr.splitlines()[-1], "one refusal for both"


def test_a_workload_without_its_packages_is_refused_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UnavailableError, match="needs torch"):
        launch.run(job_of("local", tmp_path, workload="sage", command=()), view(), print)
    assert list(tmp_path.iterdir()) == []


class Broken:
    """A target that is sound until it runs."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def check(self, job: Job) -> None:
        del job

    def plan(self, job: Job) -> Plan:
        return local.plan(job)

    def run(self, *_: object) -> Outcome:
        raise self._error


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UnavailableError("docker run failed: no such image."), 78),
        (RuntimeError("a bug"), 70),
        (KeyboardInterrupt(), 130),
    ],
    ids=["refused", "bug", "ctrl-c"],
)
def test_a_result_is_written_on_every_way_out(
    name: str, error: BaseException, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "load", lambda _: Broken(error))
    shown = launch.run(job_of(name, tmp_path), view(), print)
    result = json.loads((tmp_path / "runs" / "latest" / "result.json").read_text())
    assert shown == result
    assert (result["exit_code"], result["target"]) == (code, name)
    assert result["failure"]["exit_code"] == code
    if isinstance(error, ToolkitError):
        assert "no such image" in result["failure"]["reason"]
    later = toolkit(tmp_path, "status", "--json", "--runs", str(tmp_path / "runs"))
    assert json.loads(later.stdout)["exit_code"] == code


def test_a_plan_that_cannot_be_made_leaves_no_folder(tmp_path: Path) -> None:
    ran = toolkit(tmp_path, "run", "--on", "docker", "--dry-run", "--", "true")
    assert ran.returncode == 2
    assert "needs --image" in ran.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (("true",), 0),
        (("sh", "-c", "exit 7"), 7),
        (("sh", "-c", "kill -9 $$"), 137),
        (("/no/such/program",), 127),
    ],
)
def test_a_run_of_this_machine_has_its_result(
    tmp_path: Path, command: tuple[str, ...], code: int
) -> None:
    result = launch.run(job_of("local", tmp_path, command=command), view(), print)
    kept = json.loads((tmp_path / "runs" / "latest" / "result.json").read_text())
    assert result == kept
    assert result["exit_code"] == code


def test_a_run_of_this_machine_is_cancelled(tmp_path: Path) -> None:
    start = [TOOLKIT, "run", "--on", "local", "--json", "--", "sh", "-c", "touch up; sleep 150"]
    with subprocess.Popen(start, cwd=tmp_path, stdout=subprocess.PIPE) as running:
        deadline = time.monotonic() + 60
        while not (tmp_path / "up").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert toolkit(tmp_path, "cancel").returncode == 0
        out, _ = running.communicate(timeout=60)
    assert running.returncode == 130
    assert json.loads(out)["exit_code"] == 130
