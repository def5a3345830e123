"""``toolkit import`` with real enroot: one file however many ask, whole whatever happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.registry import Registry, serve
from tests.testbed import run

if TYPE_CHECKING:
    from collections.abc import Iterator

TOOLKIT = str(Path(sys.executable).with_name("toolkit"))


@pytest.fixture(scope="module")
def image_tar(container_image: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The files of the tier's image as one layer."""
    folder = tmp_path_factory.mktemp("unpacked")
    subprocess.run(
        ["unsquashfs", "-no-progress", "-d", folder / "root", container_image],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return subprocess.run(
        ["tar", "-C", folder / "root", "-cz", "."], check=True, stdout=subprocess.PIPE
    ).stdout


@pytest.fixture
def registry(image_tar: bytes) -> Iterator[Registry]:
    """A registry that the nodes reach as ``login``, with the image as ``team/img:1``."""
    with serve(address="0.0.0.0") as server:
        server.host = server.host.replace("0.0.0.0", "login")
        server.image("1", image_tar, config={"Env": ["FROM_IMAGE=yes"], "WorkingDir": "/srv"})
        yield server


@pytest.fixture
def folder(request: pytest.FixtureRequest) -> Path:
    path = Path(os.environ["TOOLKIT_TESTBED_SHARED"], f"import-{request.node.name[:60]}")
    path.mkdir(mode=0o777)
    path.chmod(0o777)
    return path


def importing(registry: Registry, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """An import on the login node, which reaches the registry over loopback."""
    host = registry.host.replace("login", "127.0.0.1")
    return subprocess.Popen(
        [TOOLKIT, "import", f"{host}/team/img:1", f"--images={folder}", *arguments],
        env=env(folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def imported(registry: Registry, folder: Path, *arguments: str) -> str:
    """Import to the end; what was said."""
    process = importing(registry, folder, *arguments)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    return said


def env(folder: Path) -> dict[str, str]:
    own = {
        "ENROOT_ALLOW_HTTP": "yes",
        "ENROOT_CACHE_PATH": str(folder / "cache"),
        "ENROOT_CONFIG_PATH": str(folder / "config"),
    }
    return {**os.environ, **own}


def left(folder: Path) -> list[str]:
    return sorted(path.suffix for path in folder.glob("*sha256*"))


def test_case_6_7_sixteen_importers_on_two_nodes_make_one_download_and_one_file(
    registry: Registry, folder: Path
) -> None:
    ran = run(
        "srun", "-N2", "--ntasks-per-node=8", "--mem-per-cpu=500", "--overcommit",
        TOOLKIT, "import", f"{registry.host}/team/img:1", f"--images={folder}",
        ENROOT_ALLOW_HTTP="yes",
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    (path,) = set(ran.stdout.split())
    assert len(ran.stdout.split()) == 16
    assert left(folder) == [".json", ".sqsh"]
    assert registry.count("/blobs/") == 2, registry.asked  # the layer and the configuration
    record = json.loads(Path(path).with_suffix(".json").read_text())
    assert (record["reference"], record["digest"][:7]) == (f"{registry.host}/team/img:1", "sha256:")
    job = run("srun", "-N2", f"--container-image={path}", "sh", "-c", "echo $FROM_IMAGE; pwd")
    # The lines of the two tasks come as they will.
    assert sorted(job.stdout.split()) == ["/srv", "/srv", "yes", "yes"], job.stderr


def test_a_second_import_asks_for_the_manifest_only(registry: Registry, folder: Path) -> None:
    imported(registry, folder)
    registry.asked.clear()
    assert "imported already" in imported(registry, folder)
    assert registry.asked == ["GET /v2/team/img/manifests/1"]


@pytest.mark.parametrize("after", [0.0, 0.5, 1.0, 2.0, 3.0])
def test_a_killed_importer_leaves_nothing_that_is_used(
    registry: Registry, folder: Path, after: float
) -> None:
    killed = importing(registry, folder)
    time.sleep(0.3 + after)
    killed.kill()
    killed.communicate()
    whole = list(folder.glob("sha256-*.sqsh"))
    said = imported(registry, folder, "--lock-timeout=30")
    assert ("imported already" in said) == bool(whole)
    (path,) = folder.glob("sha256-*.sqsh")
    subprocess.run(["unsquashfs", "-l", path], check=True, stdout=subprocess.DEVNULL)


def test_a_cancelled_importer_leaves_nothing(registry: Registry, folder: Path) -> None:
    cancelled = importing(registry, folder)
    time.sleep(1.2)
    cancelled.send_signal(signal.SIGTERM)
    _, err = cancelled.communicate(timeout=30)
    assert cancelled.returncode == 130, err
    assert left(folder) == []


def test_a_damaged_file_is_imported_again(registry: Registry, folder: Path) -> None:
    imported(registry, folder)
    (path,) = folder.glob("sha256-*.sqsh")
    os.truncate(path, path.stat().st_size // 2)
    assert "not whole" in imported(registry, folder)
    subprocess.run(["unsquashfs", "-l", path], check=True, stdout=subprocess.DEVNULL)


def test_import_on_a_compute_node_and_a_run_that_uses_it(registry: Registry, folder: Path) -> None:
    # Looked up from the login node as localhost and by the node as itself: one name for both.
    name = f"{registry.host}/team/img:1"
    hosts = Path("/etc/hosts")
    before = hosts.read_text()
    hosts.write_text(f"{before}127.0.0.1 login\n")
    try:
        done = run(
            TOOLKIT, "import", name, "--on=slurm", f"--images={folder}",
            ENROOT_ALLOW_HTTP="yes",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        job = run(
            TOOLKIT, "run", "--on=slurm", "--nodes=2", f"--image={name}", f"--images={folder}",
            f"--runs={folder}/runs", "--", "sh", "-c", "echo $FROM_IMAGE from $SLURMD_NODENAME",
            ENROOT_ALLOW_HTTP="yes",
        )  # fmt: skip
    finally:
        hosts.write_text(before)
    assert job.returncode == 0, job.stderr
    assert "using the imported file" in job.stderr
    assert sorted(line.split("] ")[1] for line in job.stdout.splitlines()) == [
        "yes from node01",
        "yes from node02",
    ]
