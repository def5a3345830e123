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


@pytest.fixture
def registry(image_tar: bytes, login_address: str) -> Iterator[Registry]:
    """A registry with the image as ``team/img:1``."""
    with serve(address=login_address) as server:
        server.image("1", image_tar, config={"Env": ["FROM_IMAGE=yes"], "WorkingDir": "/srv"})
        yield server


@pytest.fixture
def folder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for images, and no layer downloaded before."""
    path = Path(os.environ["TOOLKIT_TESTBED_SHARED"], f"import-{request.node.name[:60]}")
    path.mkdir(mode=0o777)
    path.chmod(0o777)
    monkeypatch.setenv("ENROOT_CACHE_PATH", str(path / "cache"))
    return path


def importing(registry: Registry, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """An import on the login node."""
    return subprocess.Popen(
        [TOOLKIT, "import", f"{registry.host}/team/img:1", f"--images={folder}", *arguments],
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


def lines(job: subprocess.CompletedProcess[str]) -> list[str]:
    """What the ranks printed."""
    assert job.returncode == 0, job.stderr
    said = (line.partition("] ")[2] for line in job.stdout.splitlines())
    return sorted(line for line in said if not line.startswith("pyxis:"))


SHOW = ("--", "sh", "-c", "echo $FROM_IMAGE from $SLURMD_NODENAME")
SHOWN = ["yes from node01", "yes from node02"]


def test_import_on_a_compute_node_and_a_run_that_uses_it(registry: Registry, folder: Path) -> None:
    name = f"{registry.host}/team/img:1"
    done = run(TOOLKIT, "import", name, "--on=slurm", f"--images={folder}", ENROOT_ALLOW_HTTP="yes")
    assert done.returncode == 0, done.stderr
    job = run(
        TOOLKIT, "run", "--on=slurm", "--nodes=2", f"--image={name}", f"--images={folder}",
        f"--runs={folder}/runs", *SHOW, ENROOT_ALLOW_HTTP="yes",
    )  # fmt: skip
    assert lines(job) == SHOWN
    assert f"using the imported file of {name}: {done.stdout.strip()}" in job.stderr


def test_run_imports_first_by_tag_and_then_starts_the_file_by_digest(
    registry: Registry, folder: Path
) -> None:
    name = f"{registry.host}/team/img:1"
    options = ("--on=slurm", "--nodes=2", f"--images={folder}", f"--runs={folder}/runs")
    first = run(
        TOOLKIT, "run", *options, f"--image={name}", "--import", *SHOW, ENROOT_ALLOW_HTTP="yes"
    )
    assert lines(first) == SHOWN
    (path,) = folder.glob("sha256-*.sqsh")
    assert f"using the imported file of {name}: {path}" in first.stderr
    record = json.loads((folder / "runs/latest/run.json").read_text())
    assert record["job"]["container_image"] == str(path)
    assert registry.count("/blobs/") == 2, registry.asked

    # By digest no registry is asked, with --import or without.
    digest = path.stem.replace("-", ":")
    registry.asked.clear()
    for flags in ((), ("--import",)):
        exact = f"{registry.host}/team/img@{digest}"
        again = run(TOOLKIT, "run", *options, f"--image={exact}", *flags, *SHOW)
        assert lines(again) == SHOWN
        assert f"using the imported file of {exact}: {path}" in again.stderr
    assert registry.asked == []


def test_submit_imports_first(registry: Registry, folder: Path) -> None:
    name = f"{registry.host}/team/img:1"
    sent = run(
        TOOLKIT, "submit", "--nodes=2", f"--image={name}", "--import", f"--images={folder}",
        f"--runs={folder}/runs", *SHOW, ENROOT_ALLOW_HTTP="yes",
    )  # fmt: skip
    assert sent.returncode == 0, sent.stderr
    (path,) = folder.glob("sha256-*.sqsh")
    assert f"using the imported file of {name}: {path}" in sent.stderr
    followed = run(TOOLKIT, "logs", "-f", sent.stdout.strip())
    assert lines(followed) == SHOWN, followed.stderr
    assert registry.count("/blobs/") == 2, registry.asked


@pytest.mark.usefixtures("plain_http")
def test_a_tag_that_moved_is_not_started_from_the_old_file(
    registry: Registry, folder: Path, image_tar: bytes
) -> None:
    imported(registry, folder)
    registry.image("1", image_tar, config={"Env": ["FROM_IMAGE=new"]})
    job = run(
        TOOLKIT, "run", "--on=slurm", f"--image={registry.host}/team/img:1", f"--images={folder}",
        f"--runs={folder}/runs", *SHOW, ENROOT_ALLOW_HTTP="yes",
    )  # fmt: skip
    assert [line.split()[0] for line in lines(job)] == ["new"]
    assert "is another image by now" in job.stderr
