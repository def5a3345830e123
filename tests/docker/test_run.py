"""``toolkit run --on docker``: a job of several nodes, rehearsed in containers."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.cli import TOOLKIT

if TYPE_CHECKING:
    from pathlib import Path

    from tests.docker.conftest import Bed, Ran


def result(done: Ran) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def left_over(bed: Bed) -> list[str]:
    """Containers and networks of runs, of which none may stay."""
    containers = [container.name for container in bed.client.containers.list(all=True)]
    networks = [network.name for network in bed.client.networks.list()]
    return [name for name in [*containers, *networks] if name and name.startswith("run-")]


def test_the_default_workload_trains_on_two_containers(
    bed: Bed, built: tuple[str, Ran], tmp_path: Path
) -> None:
    image, _ = built
    words = ("run", "--on", "docker", "--nodes", "2", "--image", image, "-J", "run", "--json")
    done = bed.toolkit(*words, "--runs", tmp_path, "sage", "--epochs", "1")
    assert done.code == 0, done.stderr[-4000:]
    found = result(done)
    assert (found["target"], found["world_size"], found["hosts"]) == (
        "docker",
        2,
        ["node0", "node1"],
    )
    assert found["metrics"]["test_accuracy"] > 0.2
    assert left_over(bed) == []


def test_the_failing_rank_is_named_and_secrets_stay_off_command_lines(
    bed: Bed, built: tuple[str, Ran], tmp_path: Path
) -> None:
    image, _ = built
    program = (
        "import os, sys, time; print(os.environ['TOKEN'][::-1], os.getcwd(), flush=True);"
        " time.sleep(1); sys.exit(3) if os.environ['RANK'] == '3' else time.sleep(150)"
    )
    words = ("run", "--on", "docker", "-N", "2", "--ntasks-per-node", "2", "--image", image)
    more = ("-J", "run", "--runs", tmp_path, "--env", "TOKEN", "--json", "--")
    done = bed.toolkit(*words, *more, "python3", "-c", program, TOKEN="hunter2")
    assert done.code == 3, done.stderr[-4000:]
    failure = result(done)["failure"]
    assert (failure["rank"], failure["host"]) == (3, "node1")
    assert failure["last_lines"] == ["2retnuh /workspace"]
    assert "hunter2" not in (tmp_path / "latest/script.sh").read_text()
    assert left_over(bed) == []


def test_an_image_that_is_not_there_is_78(bed: Bed, tmp_path: Path) -> None:
    words = ("run", "--on", "docker", "--image", f"{bed.registry}/none:1", "-J", "run")
    done = bed.toolkit(*words, "--runs", tmp_path, "--", "true")
    assert done.code == 78
    assert "none" in done.stderr
    assert json.loads((tmp_path / "latest/result.json").read_text())["exit_code"] == 78
    assert left_over(bed) == []


@pytest.mark.parametrize("how", ["signal", "cancel"])
def test_a_run_that_is_ended_leaves_its_result_and_nothing_else(
    bed: Bed, built: tuple[str, Ran], tmp_path: Path, how: str
) -> None:
    image, _ = built
    words = ("run", "--on", "docker", "-N", "2", "--image", image, "-J", "run", "--runs", tmp_path)
    run = subprocess.Popen(
        [TOOLKIT, *words, "--", "sh", "-c", "echo began; sleep 150"],
        cwd=bed.folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    log = tmp_path / "latest/logs/rank-1.log"
    deadline = time.monotonic() + 60
    while not (log.exists() and "began" in log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    if how == "signal":
        run.send_signal(signal.SIGINT)
    else:
        assert bed.toolkit("cancel", tmp_path / "latest").code == 0
    assert run.wait(60) == 130
    assert json.loads((tmp_path / "latest/result.json").read_text())["exit_code"] == 130
    assert left_over(bed) == []


def test_the_image_says_which_build_it_is_and_another_one_is_refused(
    bed: Bed, built: tuple[str, Ran], tmp_path: Path
) -> None:
    image, _ = built
    build = bed.inside(image, "printenv", "TOOLKIT_IMAGE_BUILD").strip()
    assert len(build) == 16
    for asked, code in ((build, 0), ("0" * 16, 78)):
        words = ("run", "--on", "docker", "--image", image, "-J", "run", "--runs", tmp_path)
        more = ("--env", f"TOOLKIT_EXPECTED_BUILD={asked}", "--", "true")
        done = bed.toolkit(*words, *more)
        assert done.code == code, done.stderr
    assert f"runs in build '{build}' of the image, not in '{'0' * 16}'" in done.stderr
