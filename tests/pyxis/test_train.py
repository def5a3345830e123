"""The default workload, trained in containers on two nodes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.registry import Registry, serve
from tests.testbed import run
from tests.torch_image import NOT_RUN, packages, suits

if TYPE_CHECKING:
    from collections.abc import Iterator

TOOLKIT = str(Path(sys.executable).with_name("toolkit"))
LIMIT = 240.0  # seconds; on a busy machine two nodes import the image for minutes
SQUASH = "-comp zstd -Xcompression-level 1"


@pytest.fixture(scope="module")
def registry(
    container_image: Path,
    image_tar: bytes,
    login_address: str,
    plain_http: None,  # noqa: ARG001 - the nodes import from it
) -> Iterator[Registry]:
    """A registry with an image with torch and PyG, ``team/torch:1``."""
    if not suits(container_image):
        pytest.skip("the tier's image has another Python than this environment")
    # Of one compression with the layer below: no released enroot imports an image that mixes them.
    gzip = [shutil.which("pigz") or "gzip", "-1"]
    with subprocess.Popen(packages(NOT_RUN), stdout=subprocess.PIPE) as writing:
        made = subprocess.run(gzip, stdin=writing.stdout, stdout=subprocess.PIPE, check=True)
    with serve(address=login_address) as server:
        server.image("1", image_tar, made.stdout, config={"Env": ["FROM_IMAGE=yes"]})
        yield server


def train(image: str, *arguments: str, tasks: int = 1, **env: str) -> str:
    """Train a little, so many tasks a node; what was said."""
    ran = run(
        TOOLKIT, "run", "--on=slurm", "--nodes=2", f"--ntasks-per-node={tasks}", "--json",
        f"--image={image}", *arguments, "sage", "--epochs=1", limit=LIMIT, **env,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    result: dict[str, Any] = json.loads(ran.stdout)
    assert (result["world_size"], result["hosts"]) == (2 * tasks, ["node01", "node02"])
    assert result["metrics"]["test_accuracy"] > 0.3
    return ran.stderr


@pytest.mark.parametrize("by", ["tag", "digest"])
def test_from_a_registry_each_node_imports(registry: Registry, by: str) -> None:
    (digest,) = (name for name in registry.manifests if name != "1")
    image = f"{registry.host}/team/torch" + (":1" if by == "tag" else f"@{digest}")
    registry.asked.clear()
    train(image, ENROOT_SQUASH_OPTIONS=SQUASH)
    wanted = "1" if by == "tag" else digest
    assert f"GET /v2/team/torch/manifests/{wanted}" in registry.asked
    assert registry.count("/manifests/") == registry.count(f"/manifests/{wanted}")


def test_from_a_file(registry: Registry) -> None:
    folder = Path(os.environ["TOOLKIT_TESTBED_SHARED"], "torch-images")
    name = f"{registry.host}/team/torch:1"
    said = train(name, "--import", f"--images={folder}", ENROOT_ALLOW_HTTP="yes")
    (path,) = folder.glob("sha256-*.sqsh")
    assert f"using the imported file of {name}: {path}" in said
    train(str(path), tasks=2)
