"""``toolkit customize`` and ``toolkit shell`` with real enroot."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pip
import pytest

from tests.testbed import run
from toolkit.enroot.customize import RECORD

TOOLKIT = str(Path(sys.executable).with_name("toolkit"))


@pytest.fixture(scope="module")
def shared() -> Path:
    return Path(os.environ["TOOLKIT_TESTBED_SHARED"])


@pytest.fixture(scope="module")
def with_pip(container_image: Path, shared: Path) -> Path:
    """The tier's image with this environment's pip, and a package that needs no index."""
    root = shared / "root"
    subprocess.run(
        ["unsquashfs", "-no-progress", "-d", root, container_image],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    shutil.copytree(Path(pip.__file__).parent, root / "usr/lib/python3/dist-packages/pip")
    wheel = root / "demo-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as made:
        made.writestr("demo.py", "ANSWER = 42\n")
        info = "demo-1.0.dist-info"
        made.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n")
        made.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        made.writestr(f"{info}/RECORD", "")
    image = shared / "with-pip.sqsh"
    subprocess.run(
        ["mksquashfs", root, image, "-quiet", "-no-progress", "-comp", "zstd"], check=True
    )
    shutil.rmtree(root)
    return image


@pytest.mark.parametrize("where", ["local", "slurm"])
def test_a_package_is_there_in_the_new_image(with_pip: Path, shared: Path, where: str) -> None:
    script = shared / "script.sh"
    script.write_text("echo from-script >/etc/added\n")
    new = shared / f"new-{where}.sqsh"
    made = run(
        TOOLKIT, "customize", f"--from={with_pip}", f"--output={new}", f"--on={where}",
        "--pip=/demo-1.0-py3-none-any.whl", f"--script={script}",
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    parts = ("python3 -c 'import demo; print(demo.ANSWER)'", "cat /etc/added")
    command = " ".join(f"$({part})" for part in (*parts, f"grep -c {with_pip} {RECORD}"))
    job = run(
        "srun", "-N2", f"--container-image={new}", "sh", "-c", f"echo {command}", user="tester"
    )
    assert job.stdout.split() == ["42", "from-script", "1"] * 2, job.stderr
    assert left(shared) == []
    assert containers() == []


def test_a_failure_leaves_nothing(with_pip: Path, shared: Path) -> None:
    made = run(
        TOOLKIT, "customize", f"--from={with_pip}", f"--output={shared}/bad.sqsh",
        "--pip=/none-1.0-py3-none-any.whl",
    )  # fmt: skip
    assert made.returncode == 74
    assert "none-1.0" in made.stderr
    assert not (shared / "bad.sqsh").exists()
    assert left(shared) == []
    assert containers() == []


def left(shared: Path) -> list[str]:
    return [path.name for path in shared.iterdir() if path.name.startswith(".")]


def containers() -> list[str]:
    """What enroot keeps on the login node and the nodes."""
    here = run("enroot", "list").stdout
    return (here + run("srun", "-N2", "enroot", "list").stdout).split()


def test_a_shell_runs_a_command_in_the_image_and_ends_with_its_code(container_image: Path) -> None:
    command = (TOOLKIT, "shell", f"--image={container_image}", "--env=A=b", "--")
    ran = run(*command, "sh", "-c", ". /etc/os-release; echo $ID $A $PWD; exit 7")
    assert (ran.returncode, ran.stdout.split()) == (7, ["debian", "b", "/workspace"]), ran.stderr


def test_a_shell_has_the_terminal(container_image: Path, shared: Path) -> None:
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [TOOLKIT, "shell", f"--image={container_image}"],
        stdin=follower, stdout=follower, stderr=follower, cwd=shared, start_new_session=True,
    )  # fmt: skip
    os.close(follower)
    os.write(leader, b"tty; echo n''ode-$SLURMD_NODENAME; exit 5\n")
    seen = b""
    try:
        while b"exit" not in seen[seen.find(b"node-") :] or b"node-node" not in seen:
            seen += os.read(leader, 1024)
    except OSError:  # the other end is closed
        pass
    assert process.wait(60) == 5, seen
    os.close(leader)
    assert b"node-node0" in seen
    assert b"/dev/pts/" in seen
