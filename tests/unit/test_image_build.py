"""Builds: what is asked for, and how the two builders' streams are understood."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import BuildError, UsageError
from toolkit.image import buildkit
from toolkit.image.build import (
    build_arguments,
    follow,
    make_spec,
    normal_platform,
    platform_note,
    same_platform,
    source_labels,
)

IMAGE = "sha256:" + "a" * 64


class Seen:
    """A view that remembers."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int, str]] = []
        self.lines: list[str] = []

    def step(self, number: int, total: int, text: str) -> None:
        self.steps.append((number, total, text))

    def line(self, text: str) -> None:
        self.lines.append(text)


def test_the_image_id_is_from_this_stream_and_steps_are_shown() -> None:
    seen = Seen()
    stream: list[dict[str, Any]] = [
        {"stream": "Step 1/2 : FROM base\n"},
        {"status": "Pulling fs layer", "id": "abc"},
        {"status": "Downloading", "progressDetail": {"current": 1, "total": 2}, "id": "abc"},
        {"stream": "Step 2/2 : RUN true\n"},
        {"stream": "\x1b[91mhello\x1b[0m\nthere\r\n"},
        {"aux": {"ID": IMAGE}},
        {"stream": f"Successfully built {IMAGE[7:19]}\n"},
    ]
    assert follow(stream, seen) == IMAGE
    assert seen.steps == [(1, 2, "FROM base"), (2, 2, "RUN true")]
    assert seen.lines[:3] == ["abc Pulling fs layer", "hello", "there"]


def test_a_failing_step_is_named_with_its_own_last_lines() -> None:
    stream: list[dict[str, Any]] = [
        {"stream": "Step 1/2 : RUN first\n"},
        {"stream": "of the first step\n"},
        {"aux": {"ID": IMAGE}},
        {"stream": "Step 2/2 : RUN pip install torch\n"},
        *({"stream": f"line {n}\n"} for n in range(50)),
        {
            "errorDetail": {"code": 1, "message": "returned 1"},
            "error": "returned a non-zero code: 1",
        },
    ]
    with pytest.raises(BuildError) as error:
        follow(stream, Seen())
    message = str(error.value)
    assert error.value.exit_code == 72
    assert "step 2/2, RUN pip install torch" in message
    assert "returned a non-zero code: 1" in message
    assert "line 49" in message
    assert "line 5\n" not in message
    assert "first step" not in message


def test_a_stream_without_an_image_is_a_failure() -> None:
    with pytest.raises(BuildError, match="ended without an image"):
        follow([{"stream": "Step 1/1 : FROM base\n"}], Seen())


def test_buildkit_s_failing_step_is_named_with_its_own_last_lines() -> None:
    seen = Seen()
    lines = [
        "#1 [internal] load build definition from Dockerfile",
        "#1 DONE 0.0s",
        "#5 [2/3] RUN true",
        "#5 CACHED",
        "#6 [3/3] RUN echo told && false",
        "#6 0.120 told",
        "#6 ERROR: executor failed running: exit code: 1",
        "------",
        "Dockerfile:3",
    ]
    message = buildkit.follow(lines, seen)
    assert "[3/3] RUN echo told && false" in message
    assert "exit code: 1" in message
    assert message.endswith("\n  told")
    assert "told" in seen.lines


def test_buildkit_s_error_before_any_step_is_told() -> None:
    message = buildkit.follow(["error: failed to read Dockerfile: no such file"], Seen())
    assert "no such file" in message


@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        pytest.param("amd64", "linux/amd64", id="case_9_4"),
        ("x86_64", "linux/amd64"),
        ("linux/amd64", "linux/amd64"),
        ("aarch64", "linux/arm64"),
        ("linux/arm64/v8", "linux/arm64/v8"),
        ("ARM64", "linux/arm64"),
    ],
)
def test_platforms_have_one_spelling(asked: str, sent: str) -> None:
    assert normal_platform(asked) == sent


@pytest.mark.parametrize("asked", ["", "windows/amd64", "linux/", "amd64,arm64", "linux amd64"])
def test_what_is_no_platform_is_refused(asked: str) -> None:
    with pytest.raises(UsageError, match="--platform"):
        normal_platform(asked)


def test_case_9_4_result_and_request_are_compared() -> None:
    assert not same_platform("linux/amd64", "linux/arm64")
    assert same_platform("linux/arm64/v8", "linux/arm64")
    note = platform_note(None, "linux/arm64")
    assert note
    assert "--platform linux/amd64" in note
    assert platform_note("linux/arm64", "linux/arm64") is None
    assert platform_note(None, "linux/amd64") is None


def test_arguments_of_the_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example/simple")
    assert build_arguments("cuda", None, []) == {"VARIANT": "cuda"}
    assert build_arguments("cpu", "debian:12", ["TORCH_INDEX="]) == {
        "VARIANT": "cpu",
        "BASE": "debian:12",
        "TORCH_INDEX": "",
    }
    assert build_arguments("cu130", None, ["PIP_INDEX_URL"]) == {
        "VARIANT": "cuda",
        "TORCH_INDEX": "https://download.pytorch.org/whl/cu130",
        "PIP_INDEX_URL": "https://mirror.example/simple",
    }
    with pytest.raises(UsageError, match="NOT_SET_ANYWHERE"):
        build_arguments("cpu", None, ["NOT_SET_ANYWHERE"])


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("PIP_INDEX_URL", "https://user:hunter2@mirror.example/simple", True),
        ("PIP_INDEX_URL", "https://token@mirror.example/simple", True),
        ("NPM_TOKEN", "x", True),
        ("DB_PASSWORD", "x", True),
        ("API_KEY", "x", True),
        ("NPM_TOKEN", "", False),
        ("PIP_INDEX_URL", "https://mirror.example/simple", False),
        ("BASE", f"registry.example/team/base@{IMAGE}", False),
    ],
)
def test_a_secret_as_a_build_argument_is_refused_by_its_name(
    tmp_path: Path, name: str, value: str, *, secret: bool
) -> None:
    if not secret:
        made = make_spec(tmp_path, "pyg", variant="cpu", build_args=[f"{name}={value}"])
        assert made.build_args[name] == value
    else:
        with pytest.raises(UsageError, match=name) as error:
            make_spec(tmp_path, "pyg", variant="cpu", build_args=[f"{name}={value}"])
        assert value not in str(error.value).replace(name, "")


def test_the_spec_is_the_command_line_that_docker_would_take(tmp_path: Path) -> None:
    (tmp_path / "constraints.txt").write_text("torch==2.13.0\ntorch-geometric==2.8.1\n")
    spec = make_spec(
        tmp_path,
        "reg.example:5005/team/pyg",
        variant="cpu",
        platform="amd64",
        network="host",
        pull=True,
    )
    assert spec.tag == "reg.example:5005/team/pyg:latest"
    assert spec.argv() == [
        "docker",
        "build",
        f"--file={tmp_path}/Dockerfile",
        "--build-arg=VARIANT=cpu",
        "--label=org.opencontainers.image.version=latest",
        "--label=org.pyg.version=2.8.1",
        "--platform=linux/amd64",
        "--network=host",
        "--pull",
        str(tmp_path),
    ]


def test_versions_that_conflict_stop_a_build_before_it_starts(tmp_path: Path) -> None:
    (tmp_path / "constraints.txt").write_text("torch==2.13.0\npyg-lib==0.5.0+pt213cu130\n")
    with pytest.raises(UsageError, match="cannot work together"):
        make_spec(tmp_path, "pyg", variant="cpu")
    with pytest.raises(UsageError, match=r"torch==2\.12\.0\+cu130"):
        make_spec(tmp_path, "pyg", variant="cpu", build_args=["TORCH_VERSION=2.12.0+cu130"])


def test_source_labels_have_no_login_and_tell_a_dirty_tree(tmp_path: Path) -> None:
    assert source_labels(tmp_path) == {}

    def git(*argv: str) -> None:
        identity = ["-c", "user.name=Ada", "-c", "user.email=ada@example.com"]
        subprocess.run(["git", "-C", tmp_path, *identity, *argv], check=True, capture_output=True)

    git("init")
    git("remote", "add", "origin", "https://ada:hunter2@git.example/team/code.git")
    (tmp_path / "a.py").write_text("a = 1\n")
    git("add", "a.py")
    git("commit", "-m", "first")
    labels = source_labels(tmp_path)
    assert labels["org.opencontainers.image.source"] == "https://git.example/team/code.git"
    revision = labels["org.opencontainers.image.revision"]
    assert len(revision) == 40
    (tmp_path / "a.py").write_text("a = 2\n")
    assert source_labels(tmp_path)["org.opencontainers.image.revision"] == f"{revision}-dirty"
