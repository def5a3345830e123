"""The test bed with pyxis: images start on both nodes, for root and for an ordinary user."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from tests.testbed import run

USERS = ("root", "tester")
WHERE = "import os, socket; print(socket.gethostname(), os.getuid())"


@pytest.mark.parametrize("user", USERS)
def test_image_starts_on_both_nodes(container_image: Path, user: str) -> None:
    marker = Path(os.environ["TOOLKIT_TESTBED_SHARED"], "not-in-the-image")
    marker.touch()
    script = f"test ! -e {marker} && python3 -c '{WHERE}'"
    srun = ("srun", "-N2", "--ntasks-per-node=2", f"--container-image={container_image}")
    ran = run(*srun, "bash", "-c", script, user=user)
    assert ran.returncode == 0, ran.stderr
    uid = pwd.getpwnam(user).pw_uid
    assert sorted(ran.stdout.splitlines()) == [f"node01 {uid}"] * 2 + [f"node02 {uid}"] * 2


@pytest.mark.parametrize("user", USERS)
def test_mount_and_workdir(container_image: Path, user: str) -> None:
    shared = os.environ["TOOLKIT_TESTBED_SHARED"]
    ran = run(
        "srun",
        "-N2",
        "--ntasks-per-node=1",
        f"--container-image={container_image}",
        f"--container-mounts={shared}:/workspace",
        "--container-workdir=/workspace",
        "bash",
        "-c",
        'echo "from $SLURMD_NODENAME" >"mounted.$SLURM_PROCID.$(id -u)"; pwd',
        user=user,
    )
    assert ran.stdout.split() == ["/workspace", "/workspace"], ran.stderr
    written = sorted(path.read_text() for path in Path(shared).glob("mounted.?.*"))
    assert {"from node01\n", "from node02\n"} <= set(written)


@pytest.mark.parametrize("user", USERS)
def test_named_container_is_local_to_a_node(container_image: Path, user: str) -> None:
    """A named container is unpacked into enroot's own storage, which the nodes must not share."""
    srun = ("srun", "-N2", "--ntasks-per-node=1", "--container-name=kept", "--container-writable")
    script = 'echo "$SLURMD_NODENAME" >>/mark; cat /mark'
    first = run(*srun, f"--container-image={container_image}", "bash", "-c", script, user=user)
    assert sorted(first.stdout.split()) == ["node01", "node02"], first.stderr
    again = run(*srun, "bash", "-c", script, user=user)
    assert sorted(again.stdout.split()) == ["node01"] * 2 + ["node02"] * 2, again.stderr
    removed = run(
        "srun", "-N2", "--ntasks-per-node=1", "enroot", "remove", "-f", "pyxis_kept", user=user
    )
    assert removed.returncode == 0, removed.stderr


def test_batch_job_takes_a_container_on_its_srun_line(container_image: Path) -> None:
    script = f"srun --container-image={container_image} sh -c '. /etc/os-release; echo $ID'"
    submitted = run("sbatch", "--parsable", "--wait", "-N2", "--wrap", script, user="tester")
    output = Path(os.environ["TOOLKIT_TESTBED_SHARED"], f"slurm-{submitted.stdout.strip()}.out")
    assert output.read_text().split() == ["debian", "debian"]
    assert submitted.returncode == 0


def test_missing_image_is_told_by_pyxis() -> None:
    ran = run("srun", "-N2", "--container-image=/nonexistent/image.sqsh", "true", user="tester")
    assert ran.returncode != 0
    assert "pyxis" in ran.stderr
    assert "/nonexistent/image.sqsh" in ran.stderr
