"""The files of ``enroot/`` where they count: in containers of real Slurm steps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.testbed import run
from toolkit.entrypoint.rendezvous import derive_port

TOOLKIT = str(Path(sys.executable).with_name("toolkit"))
NAMES = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK MASTER_ADDR MASTER_PORT"
SHOW = f"echo $SLURM_JOB_ID.$SLURM_STEP_ID {' '.join(f'${name}' for name in NAMES.split())}"


@pytest.fixture(scope="module")
def config() -> str:
    """A user's folder of enroot's with the files installed."""
    folder = Path(os.environ["TOOLKIT_TESTBED_SHARED"], "enroot-config")
    env = {**os.environ, "ENROOT_CONFIG_PATH": str(folder)}
    done = subprocess.run([TOOLKIT, "enroot", "install"], env=env, capture_output=True, check=True)
    assert done.stdout.count(b"is new") == 3
    return str(folder)


def tasks(output: str) -> list[list[str]]:
    return sorted((line.split() for line in output.splitlines()), key=lambda words: words[1])


@pytest.mark.parametrize("user", ["root", "tester"])
def test_an_image_without_pytorch_version_gets_all_variables(
    container_image: Path, config: str, user: str
) -> None:
    ran = run(
        "srun", "-N2", "--ntasks-per-node=2", f"--container-image={container_image}",
        "sh", "-c", SHOW, user=user, ENROOT_CONFIG_PATH=config, WORLD_SIZE="99",
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    job, step = map(int, ran.stdout.split()[0].split("."))
    port = str(derive_port(job, step))
    assert [words[1:] for words in tasks(ran.stdout)] == [
        ["0", "4", "0", "2", "0", "node01", port],
        ["1", "4", "1", "2", "0", "node01", port],
        ["2", "4", "0", "2", "1", "node01", port],
        ["3", "4", "1", "2", "1", "node01", port],
    ]


def test_without_the_hook_there_are_none(container_image: Path) -> None:
    ran = run("srun", "-n1", f"--container-image={container_image}", "sh", "-c", SHOW)
    assert len(ran.stdout.split()) == 1, ran.stdout


def test_a_smaller_step_of_a_larger_job_gets_its_own(container_image: Path, config: str) -> None:
    script = f"srun -N2 -n3 --distribution=block --container-image={container_image} sh -c '{SHOW}'"
    ran = run(
        "salloc", "-N2", "--ntasks-per-node=4", "bash", "-c", script, ENROOT_CONFIG_PATH=config
    )
    assert ran.returncode == 0, ran.stderr
    shown = tasks(ran.stdout)
    assert [words[1:3] for words in shown] == [["0", "3"], ["1", "3"], ["2", "3"]]
    assert [words[4] for words in shown] == ["2", "2", "1"]


def test_an_address_of_the_jobs_own_is_kept(container_image: Path, config: str) -> None:
    ran = run(
        "srun", "-N2", "--ntasks-per-node=1", f"--container-image={container_image}",
        "sh", "-c", "echo $MASTER_ADDR $MASTER_PORT",
        ENROOT_CONFIG_PATH=config, MASTER_ADDR="node02", MASTER_PORT="12345",
    )  # fmt: skip
    assert ran.stdout.split() == ["node02", "12345"] * 2


def test_python_of_the_image_survives_the_login_nodes_variables(
    container_image: Path, config: str
) -> None:
    command = ("srun", "-n1", f"--container-image={container_image}", "python3", "-c", "print(1)")
    assert run(*command, PYTHONHOME="/opt/python").returncode != 0
    ran = run(*command, PYTHONHOME="/opt/python", ENROOT_CONFIG_PATH=config)
    assert ran.stdout.split() == ["1"], ran.stderr


def test_a_job_of_the_toolkit_agrees_with_the_hook(container_image: Path, config: str) -> None:
    command = (
        TOOLKIT, "run", "--on=slurm", "--nodes=2", "--ntasks-per-node=2",
        f"--image={container_image}", "--", "sh", "-c", "echo $RANK of $WORLD_SIZE",
    )  # fmt: skip
    outputs = []
    for ran in (run(*command), run(*command, ENROOT_CONFIG_PATH=config)):
        assert ran.returncode == 0, ran.stderr
        outputs.append(sorted(line.split("] ")[1] for line in ran.stdout.splitlines()))
    assert outputs == [[f"{rank} of 4" for rank in range(4)]] * 2
