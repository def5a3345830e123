"""``toolkit build`` with a real engine: what is in the image, what is rebuilt, what fails."""

from __future__ import annotations

import json
import os
import re
import subprocess
from typing import TYPE_CHECKING

import pytest

from toolkit.errors import UnavailableError
from toolkit.image.buildkit import require

if TYPE_CHECKING:
    from pathlib import Path

    from tests.docker.conftest import Bed, Ran

pytestmark = pytest.mark.timeout(1200)  # the first test builds the image, cold


def test_the_build_reports_and_tests_what_it_built(built: tuple[str, Ran]) -> None:
    name, done = built
    result = json.loads(done.stdout)
    assert result["image"] == name
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", result["image_id"])
    assert result["platform"] == "linux/amd64"
    assert result["versions"]["torch"].startswith("2.")
    assert "context: " in done.stderr
    assert "\nstep 1/" in done.stderr
    assert "ok    ddp-2" in done.stderr
    assert "\x1b" not in done.stderr


def test_what_the_image_is_made_of(bed: Bed, image: str) -> None:
    attrs = bed.client.images.get(image).attrs
    environ = dict(entry.split("=", 1) for entry in attrs["Config"]["Env"])
    version = bed.inside(image, "python3", "-c", "import torch; print(torch.__version__)")
    assert environ["PYTORCH_VERSION"] == version.split("+")[0].strip()
    assert "NVIDIA_VISIBLE_DEVICES" not in environ  # enroot would want a GPU
    labels = attrs["Config"]["Labels"]
    assert labels["org.pytorch.version"] == environ["PYTORCH_VERSION"]
    assert labels["org.opencontainers.image.version"] == "1"
    assert attrs["Config"]["Entrypoint"] is None

    # torch and its dependencies are one layer, and most of the image.
    layers = bed.client.images.get(image).history()
    dependencies = max(layer["Size"] for layer in layers if "/opt/venv" in layer["CreatedBy"])
    assert dependencies / attrs["Size"] > 0.75


def test_a_login_shell_finds_the_same_python_and_the_entrypoint(bed: Bed, image: str) -> None:
    script = "command -v python3; python3 -m toolkit.entrypoint --show"
    shown = bed.inside(image, "sh", "-lc", script)
    path, _, world = shown.partition("\n")
    assert path == "/opt/venv/bin/python3"
    assert json.loads(world)["world_size"] == 1


def test_no_build_tools_and_caches(bed: Bed, image: str) -> None:
    tools = bed.inside(image, "sh", "-c", "command -v gcc git pip pip3; true")
    caches = r"""find / -xdev \( -name '*.whl' -path '/opt/*' -o -name .cache -o -path '/tmp/*' \
        -o -path '/opt/*/pip/*' -o -path '/var/lib/apt/lists/*_Packages' \) 2>/dev/null; true"""
    assert (tools + bed.inside(image, "sh", "-c", caches)).split() == []


def rebuild(bed: Bed, context: Path, image: str, options: list[str]) -> str:
    done = bed.toolkit("build", context, f"--image={image}", "--no-smoke", *options)
    assert done.code == 0, done.stderr[-2000:]
    return done.stderr


def test_an_unchanged_rebuild_makes_no_layer(
    bed: Bed, context: Path, image: str, build_options: list[str]
) -> None:
    before = bed.client.images.get(image).id
    log = rebuild(bed, context, image, build_options)
    assert bed.client.images.get(image).id == before
    assert "Running in" not in log
    assert log.count("Using cache") > 10


def test_a_changed_workload_rebuilds_no_dependency(
    bed: Bed, context: Path, image: str, build_options: list[str]
) -> None:
    before = bed.client.images.get(image).attrs["RootFS"]["Layers"]
    changed = context / "workloads" / "changed.py"
    changed.write_text("# a user's own\n")
    try:
        rebuild(bed, context, f"{bed.registry}/team/changed:1", build_options)
    finally:
        changed.unlink()
    after = bed.client.images.get(f"{bed.registry}/team/changed:1").attrs["RootFS"]["Layers"]
    differ = [n for n, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    assert differ
    assert min(differ) >= len(before) - 2  # the workloads, and the empty folder behind them


@pytest.fixture
def small(tmp_path: Path, bed: Bed) -> Path:
    """A context of one line."""
    (tmp_path / "Dockerfile").write_text(f"FROM {bed.base}\nRUN true\n")
    (tmp_path / ".dockerignore").write_text("*\n")
    return tmp_path


def test_a_step_that_fails_is_shown_and_the_tag_keeps_its_older_image(
    bed: Bed, small: Path
) -> None:
    build = ("build", small, "--image=team/small:1", "--no-smoke")
    assert bed.toolkit(*build).code == 0
    older = bed.client.images.get("team/small:1").id
    (small / "Dockerfile").write_text(f"FROM {bed.base}\nRUN echo why it failed >&2; exit 3\n")
    done = bed.toolkit(*build)
    assert done.code == 72
    message = done.stderr.partition("toolkit: ")[2]
    assert "step 2/" in message
    assert "returned a non-zero code: 3" in message
    assert "why it failed" in message
    assert done.stdout == ""
    assert bed.client.images.get("team/small:1").id == older
    assert bed.client.containers.list(all=True) == []


@pytest.mark.parametrize(
    ("dockerfile", "told"),
    [
        ("FROM {base}\nNONSENSE here\n", "NONSENSE"),
        ("FROM 127.0.0.1:9/team/none:1\n", "127.0.0.1:9/team/none:1"),
        ("", "Dockerfile"),
    ],
)
def test_what_cannot_be_built_is_exit_72_with_the_engine_s_reason(
    bed: Bed, small: Path, dockerfile: str, told: str
) -> None:
    (small / "Dockerfile").write_text(dockerfile.format(base=bed.base))
    done = bed.toolkit("build", small, "--image=team/broken:1", "--no-smoke")
    assert done.code == 72
    assert told in done.stderr.partition("toolkit: ")[2]
    assert "Traceback" not in done.stderr


def test_case_9_4_another_platform_than_asked_for_is_an_error_and_gets_no_tag(
    bed: Bed, small: Path
) -> None:
    done = bed.toolkit("build", small, "--image=team/arm:1", "--platform=arm64", "--no-smoke")
    assert done.code == 72
    assert "linux/arm64 was asked for, but a linux/amd64 image" in done.stderr
    assert not bed.client.images.list("team/arm")


def test_case_9_3_an_ignored_dockerfile_builds_and_ignored_files_do_not_arrive(
    bed: Bed, small: Path
) -> None:
    (small / "Docker").mkdir()
    (small / "Docker/Dockerfile").write_text(f"FROM {bed.base}\nCOPY . /x\n")
    (small / "data").mkdir()
    (small / "data/raw.bin").write_text("raw")
    (small / "data/keep.txt").write_text("keep")
    (small / "loop").symlink_to(".")
    (small / ".dockerignore").write_text("Docker/\ndata\n!data/keep.txt\n")
    file = f"--file={small / 'Docker/Dockerfile'}"
    done = bed.toolkit("build", small, file, "--image=team/ignore:1", "--no-smoke")
    assert done.code == 0, done.stderr
    assert bed.inside("team/ignore:1", "ls", "/x/data").split() == ["keep.txt"]
    assert "loop -> ." in bed.inside("team/ignore:1", "ls", "-l", "/x")


def test_a_base_that_brings_torch_is_used_as_it_is(
    bed: Bed, image: str, context: Path, build_options: list[str]
) -> None:
    # As NVIDIA's images have it: torch among the system's packages, under a version of its own.
    version = "import sysconfig; print(sysconfig.get_python_version())"
    python = bed.inside(image, "python3", "-c", version).strip()
    system = f"/usr/local/lib/python{python}/dist-packages"
    site = bed.image(
        "team/site-base:1",
        f"FROM {bed.base}\n"
        f"COPY --from={image} /opt/venv/lib/python{python}/site-packages/ {system}/\n"
        f"RUN rm {system}/toolkit.pth\n"
        "ENV PYTORCH_VERSION=2.13.0a0+site NVIDIA_VISIBLE_DEVICES=all\n",
    )
    options = [option for option in build_options if not option.startswith("--base")]
    done = bed.toolkit(
        "build", context, "--image=team/site:1", f"--base={site}", "--no-smoke", *options
    )
    assert done.code == 0, done.stderr[-2000:]
    assert "The base image's own torch is used" in done.stderr
    attrs = bed.client.images.get("team/site:1").attrs
    assert "PYTORCH_VERSION=2.13.0a0+site" in attrs["Config"]["Env"]
    where = "import torch, torch_geometric as g; print(torch.__file__, g.__file__)"
    assert "/opt/venv" not in bed.inside("team/site:1", "python3", "-c", where)
    added = attrs["Size"] - bed.client.images.get(site).attrs["Size"]
    assert added < 20_000_000
    tested = bed.toolkit("smoke", "team/site:1")
    assert tested.code == 0, tested.stdout


@pytest.fixture
def with_buildkit() -> str:
    """PATH with a docker command line in front that has BuildKit; the first may lack its plugin."""
    reasons = set()
    for folder in os.environ["PATH"].split(":"):
        path = f"{folder}:{os.environ['PATH']}"
        try:
            require({**os.environ, "PATH": path})
        except UnavailableError as error:
            reasons.add(str(error))
            continue
        return path
    pytest.skip("; ".join(sorted(reasons)))


def test_buildkit(bed: Bed, small: Path, with_buildkit: str) -> None:
    build = (
        "build", small, "--image=team/kit:1", "--builder=buildkit", "--network=host", "--no-smoke",
    )  # fmt: skip
    done = bed.toolkit(*build, PATH=with_buildkit)
    assert done.code == 0, done.stderr
    older = bed.client.images.get("team/kit:1").id

    (small / "Dockerfile").write_text(f"FROM {bed.base}\nRUN echo why it failed; exit 3\n")
    done = bed.toolkit(*build, PATH=with_buildkit)
    assert done.code == 72
    assert "why it failed" in done.stderr.partition("toolkit: ")[2]
    assert bed.client.images.get("team/kit:1").id == older


def test_buildkit_builds_the_whole_image(
    bed: Bed, context: Path, build_options: list[str], with_buildkit: str
) -> None:
    options = ["--image=team/whole:1", "--builder=buildkit", *build_options]
    done = bed.toolkit("build", context, *options, PATH=with_buildkit)
    assert done.code == 0, done.stderr[-2000:]
    assert "ok    ddp-2" in done.stderr


def test_buildkit_that_is_missing_is_explained(bed: Bed, small: Path, tmp_path: Path) -> None:
    cli = tmp_path / "bin" / "docker"
    cli.parent.mkdir()
    cli.write_text('#!/bin/sh\n[ "$1" = version ] && echo 28.2.2\n')
    cli.chmod(0o755)
    build = ("build", small, "--builder=buildkit", "--no-smoke")
    done = bed.toolkit(*build, PATH=str(cli.parent))
    assert done.code == 78
    assert "docker 28.2.2 has no buildx plugin" in done.stderr
    done = bed.toolkit(*build, PATH=str(tmp_path))
    assert done.code == 78
    assert "docker command line, which is missing" in done.stderr


def test_a_dry_run_needs_no_engine_and_prints_what_can_be_pasted(bed: Bed, small: Path) -> None:
    done = bed.toolkit(
        "build", small, "--image=team/dry:1", "--push", "--dry-run", DOCKER_HOST="unix:///none"
    )
    assert done.code == 0, done.stderr
    build, smoke, push = done.stdout.splitlines()
    assert smoke == "toolkit smoke team/dry:1"
    assert push == "docker push team/dry:1"
    pasted = subprocess.run(build, shell=True, capture_output=True, text=True, check=False)
    assert pasted.returncode == 0, pasted.stderr
    assert bed.client.images.get("team/dry:1")


def test_a_push_needs_a_name_and_a_secret_argument_is_refused(bed: Bed, small: Path) -> None:
    done = bed.toolkit("build", small, "--push")
    assert (done.code, "no image: name one" in done.stderr) == (2, True)
    done = bed.toolkit("build", small, f"--build-arg=REGISTRY_PASSWORD={bed.password}")
    assert done.code == 2
    assert "REGISTRY_PASSWORD" in done.stderr
