"""Tier pyxis: the cluster of tier slurm, where pyxis and enroot are installed on the machine."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.testbed import CANNOT, TESTBED, run, slurm_testbed

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session", autouse=True)
def testbed() -> Iterator[None]:
    """The cluster with pyxis loaded, for every test of the tier."""
    with slurm_testbed():
        if not os.environ["TOOLKIT_TESTBED_PYXIS"]:
            pytest.skip("pyxis is not installed on this machine")
        yield


@pytest.fixture(scope="session")
def container_image(testbed: None) -> Path:  # noqa: ARG001  # only after the machine was checked
    """A squashfs image of Debian with python3 and nothing else, made once and kept."""
    made = subprocess.run(
        [TESTBED / "slurm.sh", "image"], check=False, stdout=subprocess.PIPE, text=True
    )
    if made.returncode == CANNOT:
        pytest.skip("the image for the tests could not be made on this machine")
    made.check_returncode()
    return Path(made.stdout.strip())


@pytest.fixture(scope="session")
def image_tar(container_image: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The files of that image as one layer."""
    folder = tmp_path_factory.mktemp("unpacked")
    subprocess.run(
        ["unsquashfs", "-no-progress", "-d", folder / "root", container_image],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return subprocess.run(
        ["tar", "-C", folder / "root", "-cz", "."], check=True, stdout=subprocess.PIPE
    ).stdout


@pytest.fixture(scope="session")
def login_address(testbed: None) -> str:  # noqa: ARG001  # it must be up
    """Where the login node and the nodes reach a server of this process."""
    found = run("srun", "-n1", "getent", "hosts", "login")
    return found.stdout.split()[0]


@pytest.fixture(scope="session")
def plain_http(testbed: None) -> Iterator[None]:  # noqa: ARG001  # it must be up
    """pyxis imports from registries that speak plain http, as an administrator decides."""
    conf = Path(os.environ["SLURM_CONF"]).parent / "enroot.conf.d" / "50-http.conf"
    conf.write_text("ENROOT_ALLOW_HTTP yes\n")
    yield
    conf.unlink(missing_ok=True)
