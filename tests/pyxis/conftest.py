"""Tier pyxis: the cluster of tier slurm, where pyxis and enroot are installed on the machine."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.testbed import CANNOT, TESTBED, slurm_testbed

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
