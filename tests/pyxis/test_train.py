"""The default workload, trained in containers on two nodes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.testbed import run
from tests.torch_image import unpack
from toolkit.enroot import squashfs

if TYPE_CHECKING:
    from collections.abc import Iterator

TOOLKIT = str(Path(sys.executable).with_name("toolkit"))


@pytest.fixture(scope="module")
def root(container_image: Path) -> Iterator[Path]:
    """The files of an image with torch and PyG."""
    folder = Path(os.environ["TOOLKIT_TESTBED_SHARED"], "torch")
    folder.mkdir()
    made = unpack(container_image, folder)
    if made is None:
        pytest.skip("the tier's image has another Python than this environment")
    yield made
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def torch_image(root: Path) -> Path:
    target = root.parent / "torch.sqsh"
    options = [*squashfs.OPTIONS.split(), "-quiet", "-no-progress"]
    subprocess.run(["mksquashfs", root, target, *options], check=True)
    return target


def train(image: str, *arguments: str, **env: str) -> tuple[dict[str, object], str]:
    """The result of a small training, and what was said."""
    ran = run(
        TOOLKIT, "run", "--on=slurm", "--nodes=2", "--ntasks-per-node=2", "--json",
        f"--image={image}", *arguments, "sage", "--epochs=1", **env,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    result: dict[str, object] = json.loads(ran.stdout)
    return result, ran.stderr


def test_from_a_file(torch_image: Path) -> None:
    result, _ = train(str(torch_image))
    assert (result["world_size"], result["hosts"]) == (4, ["node01", "node02"])
    metrics = result["metrics"]
    assert isinstance(metrics, dict)
    assert metrics["test_accuracy"] > 0.3
