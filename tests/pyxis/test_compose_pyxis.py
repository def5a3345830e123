"""The composed srun and sbatch with an image: what arrives in a container that pyxis starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.test_compose import NASTY, PYTHON, VALUES, WAIT, Cluster, cluster
from toolkit.entrypoint.run_files import IN_CONTAINER
from toolkit.options import JobSpec

__all__ = ["cluster"]  # the fixture

LOGIN_NODE = {
    "PYTHONHOME": sys.base_prefix,  # right here; in the image it would kill python3 at its start
    "PYTHONPATH": "/nowhere",
    "LD_LIBRARY_PATH": "/nowhere",
    "CONDA_PREFIX": "/nowhere",
}


def job(image: Path, *arguments: str, **options: Any) -> JobSpec:
    return JobSpec(
        command=(PYTHON, "show.py", *arguments), container_image=str(image), **{**WAIT, **options}
    )


@pytest.mark.parametrize("extra", [(), (":",)], ids=["case_8_5", "case_8_5_lone_colon"])
@pytest.mark.parametrize("how", ["srun", "sbatch"])
def test_arguments_and_variables_arrive_byte_for_byte(
    cluster: Cluster,
    container_image: Path,
    how: str,
    extra: tuple[str, ...],
) -> None:
    environ = {**os.environ, **LOGIN_NODE}
    del environ[
        "PYTHONHOME"
    ]  # it would stop the toolkit's own Python, which makes the run's folder
    spec = job(
        container_image, *NASTY, *extra, nodes=2, ntasks_per_node=2, env=tuple(VALUES.items())
    )
    plan = cluster.plan(spec, environ) if how == "srun" else cluster.batch(spec, environ)
    ran = cluster.paste(plan, environ)
    assert ran.returncode == 0, ran.stderr
    seen = cluster.seen()
    assert [rank["argv"] for rank in seen] == [[*NASTY, *extra]] * 4
    for number, rank in enumerate(seen):
        env = rank["env"]
        assert {name: env[name] for name in VALUES} == VALUES
        assert (env["RANK"], env["WORLD_SIZE"], rank["cwd"]) == (str(number), "4", "/workspace")
        assert env["TOOLKIT_RUN_DIR"] == IN_CONTAINER
        assert not set(LOGIN_NODE) & set(env)
        assert (cluster.folder / "run" / "ranks" / f"{number}.json").exists()


@pytest.mark.parametrize("mounted", [False, True])
def test_home_is_mounted_only_when_asked_case_6(
    cluster: Cluster,
    container_image: Path,
    mounted: bool,
) -> None:
    marker = Path.home() / f".toolkit-test-{os.getpid()}"
    marker.touch()
    try:
        spec = job(container_image, container_mount_home=mounted)
        command = ("test", "-e" if mounted else "!", *(() if mounted else ("-e",)), str(marker))
        plan = cluster.plan(JobSpec(**{**vars(spec), "command": command}))
        assert cluster.paste(plan).returncode == 0
    finally:
        marker.unlink()


def test_outside_of_the_container_nothing_starts(
    cluster: Cluster,
    container_image: Path,
) -> None:
    plan = cluster.plan(job(container_image))
    (process,) = plan.processes
    without = [word for word in process.argv if not word.startswith("--container-image")]
    subprocess.run(plan.stage, check=True, cwd=cluster.folder)
    ran = subprocess.run(
        without,
        env=plan.environment(process, os.environ),
        cwd=cluster.folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode != 0
    assert IN_CONTAINER in ran.stderr + ran.stdout
    assert cluster.seen() == []
