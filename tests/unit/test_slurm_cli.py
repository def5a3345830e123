"""From the command line, the file and variables to the srun line, without a cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from toolkit import config
from toolkit.errors import UsageError

TOOLKIT = str(Path(sys.executable).with_name("toolkit"))


def dry_run(cwd: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name in {"PATH", "HOME"}}
    return subprocess.run(
        [TOOLKIT, "run", "--dry-run", "--on", "slurm", *words],
        cwd=cwd,
        env={**kept, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_tutorials_job_on_a_laptop(tmp_path: Path) -> None:
    ran = dry_run(
        tmp_path,
        *("--nodes", "2", "--ntasks-per-node", "2", "--gpus-per-node", "2"),
        *("--container-image", "nvcr.io/nvidia/pyg:24.01-py3"),
        *("--container-mounts", ".:/workspace"),
        *("--", "python3", "distributed_sampling_multinode.py"),
    )
    assert ran.returncode == 0, ran.stderr
    (line,) = [line for line in ran.stdout.splitlines() if line.startswith("srun ")]
    for word in (
        "--container-image=nvcr.io#nvidia/pyg:24.01-py3",
        f"--container-mounts={tmp_path}:/workspace,",
        "--container-workdir=/workspace",
        "--ntasks-per-node=2",
        "--gpu-bind=none",
        "--kill-on-bad-exit=1",
    ):
        assert word in line
    assert line.endswith("-- python3 distributed_sampling_multinode.py")
    assert not (tmp_path / "runs").exists()


def test_the_tutorials_own_flags_become_the_per_node_form(tmp_path: Path) -> None:
    words = ("--nodes", "2", "--ntasks", "4", "--gpus-per-task", "1", "--", "true")
    line = dry_run(tmp_path, *words).stdout.splitlines()[-2]
    assert "--ntasks=4 --ntasks-per-node=2 --gpus-per-node=2 " in line
    assert "--gpus-per-task" not in line


def test_a_step_that_does_not_fit_ends_with_78(tmp_path: Path) -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "PATH": "/nowhere"}
    ran = dry_run(tmp_path, "--nodes", "3", "--", "true", **job)
    assert ran.returncode == 78
    assert "SLURM_JOB_ID=7" in ran.stderr
    fits = dry_run(tmp_path, "--nodes", "2", "--", "true", **job)
    assert "--jobid=7 --overlap " in fits.stdout


@pytest.mark.parametrize("given", ["1", "true", "Yes"])
def test_switches_may_stand_in_file_and_variables(tmp_path: Path, given: str) -> None:
    (tmp_path / config.FILE_NAME).write_text(
        "[job]\ncontainer-writable = true\ncontainer-image = 'ubuntu'\n"
    )
    line = dry_run(tmp_path, "--", "true", TOOLKIT_CONTAINER_MOUNT_HOME=given).stdout
    assert "--container-writable" in line
    assert " --container-mount-home " in line
    assert "export PYTHONNOUSERSITE=1" in line
    off = dry_run(tmp_path, "--no-container-writable", "--", "true").stdout
    assert "--container-writable" not in off


@pytest.mark.parametrize(
    ("text", "environ", "says"),
    [
        ("[job]\nhold = 1", {}, "true or false"),
        ("[job]\nrequeue = 'no'", {}, "true or false"),
        ("", {"TOOLKIT_REQUEUE": "maybe"}, "TOOLKIT_REQUEUE=maybe: must be true or false"),
    ],
)
def test_switches_are_true_or_false(
    tmp_path: Path, text: str, environ: dict[str, str], says: str
) -> None:
    (tmp_path / config.FILE_NAME).write_text(text)
    with pytest.raises(UsageError, match=says):
        config.settings({}, environ, tmp_path)


@pytest.mark.parametrize(
    ("given", "source"), [({"requeue": False}, "--no-requeue"), ({"hold": True}, "--hold")]
)
def test_switches_are_named_as_they_were_typed(
    tmp_path: Path, given: dict[str, Any], source: str
) -> None:
    (found,) = config.settings(given, {}, tmp_path).values()
    assert found.source == source
