"""What ``toolkit export`` writes starts like an imported image."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.testbed import run
from toolkit.enroot.export import to_squashfs

CONFIG = {
    "Env": ["FROM_IMAGE=a b"],
    "WorkingDir": "/srv/work",
    "Entrypoint": ["/usr/bin/env", "FROM_ENTRYPOINT=yes"],
}
SHOW = 'echo "$FROM_IMAGE|$PWD|$FROM_ENTRYPOINT"'


@pytest.fixture(scope="module")
def exported(container_image: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("export") / "root"
    subprocess.run(
        ["unsquashfs", "-no-progress", "-d", root, container_image],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    target = Path(os.environ["TOOLKIT_TESTBED_SHARED"], "exported.sqsh")
    with subprocess.Popen(["tar", "-C", root, "-c", "."], stdout=subprocess.PIPE) as made:
        assert made.stdout is not None
        to_squashfs(made.stdout, target, CONFIG)
    return target


@pytest.mark.parametrize("user", ["root", "tester"])
@pytest.mark.parametrize(("flag", "entrypoint"), [("no-", ""), ("", "yes")])
def test_environment_workdir_and_entrypoint_are_kept(
    exported: Path, user: str, flag: str, entrypoint: str
) -> None:
    ran = run(
        "srun", "-N2", f"--container-image={exported}", f"--{flag}container-entrypoint",
        "sh", "-c", SHOW, user=user,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [f"a b|/srv/work|{entrypoint}"] * 2
