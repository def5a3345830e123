"""``toolkit export``: an image of a real engine as a squashfs file."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.docker.conftest import Bed

TOOLKIT = Path(sys.executable).with_name("toolkit")

if shutil.which("mksquashfs") is None:
    pytest.skip("squashfs-tools is not installed", allow_module_level=True)


def export(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [TOOLKIT, "export", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True)


@pytest.fixture
def image(bed: Bed) -> Iterator[str]:
    """An image with settings of its own."""
    container = bed.client.containers.create(bed.base, ["true"])
    container.commit("export-test", conf={"Env": ["A=b c", "PATH=/bin"], "WorkingDir": "/srv/x"})
    container.remove()
    yield "export-test"
    bed.client.images.remove("export-test")


def test_an_image_is_written_whole_and_leaves_nothing(bed: Bed, image: str) -> None:
    before = {container.id for container in bed.client.containers.list(all=True)}
    target = bed.folder / "base.sqsh"
    done = export(image, "-o", target)
    assert done.returncode == 0, done.stderr
    assert {container.id for container in bed.client.containers.list(all=True)} == before
    assert [path.name for path in bed.folder.glob("*base.sqsh*")] == [target.name]
    shown = subprocess.run(
        ["unsquashfs", "-cat", target, "etc/environment"],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    assert shown == "A=b c\nPATH=/bin\n"
    listed = subprocess.run(["unsquashfs", "-l", target], check=True, capture_output=True).stdout
    assert b"squashfs-root/srv/x\n" in listed
    again = export(image, "-o", target)
    assert (again.returncode, "--force" in again.stderr) == (2, True)


def test_an_image_that_is_not_there_is_told(bed: Bed) -> None:
    done = export("nosuch:1", "-o", bed.folder / "none.sqsh")
    assert done.returncode == 78
    assert "nosuch:1" in done.stderr
    assert not (bed.folder / "none.sqsh").exists()
