"""The default workload, trained in containers on two nodes, from a file and from a registry."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.registry import serve
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


def test_from_a_registry_by_tag_and_by_digest(root: Path) -> None:
    """The file of a tag is used until the tag moves, and that of a digest for good."""
    images = root.parent / "images"
    layer = subprocess.run(["tar", "-C", root, "-cz", "."], check=True, capture_output=True).stdout
    with serve() as server:
        digest = server.image("1", layer)
        name = f"{server.host}/team/pyg"
        options = (f"--images={images}",)
        # On its own, since it takes longer than a command on the test bed may.
        subprocess.run(
            [TOOLKIT, "import", f"{name}:1", *options],
            env={**os.environ, "ENROOT_ALLOW_HTTP": "yes"}, check=True, timeout=240,
        )  # fmt: skip
        blobs = server.count("/blobs/")
        for image in (f"{name}:1", f"{name}@{digest}"):
            _, said = train(image, *options, ENROOT_ALLOW_HTTP="yes")
            assert f"sha256-{digest[7:]}.sqsh" in said
        assert server.count("/blobs/") == blobs
