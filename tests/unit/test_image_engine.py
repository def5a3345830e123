"""Which engine is asked, and what a user reads where none answers."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from pathlib import Path

import pytest

from toolkit.errors import UnavailableError
from toolkit.image.engine import Candidate, candidates, connect, explain, no_engine


def urls(explicit: str | None = None, **environ: str) -> list[str]:
    return [candidate.url for candidate in candidates(explicit, environ)]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A docker configuration whose current context is `lab`."""
    meta = tmp_path / "contexts/meta" / hashlib.sha256(b"lab").hexdigest()
    meta.mkdir(parents=True)
    endpoint = {"Endpoints": {"docker": {"Host": "ssh://gpu.lab.example"}}}
    (meta / "meta.json").write_text(json.dumps(endpoint))
    (tmp_path / "config.json").write_text('{"currentContext": "lab"}')
    return tmp_path


def test_a_named_engine_comes_alone_the_option_before_the_variable_before_the_context(
    config: Path,
) -> None:
    folder = str(config)
    assert urls("unix:///a", DOCKER_HOST="unix:///b", DOCKER_CONFIG=folder) == ["unix:///a"]
    assert urls(DOCKER_HOST="unix:///b", DOCKER_CONFIG=folder) == ["unix:///b"]
    assert urls(DOCKER_CONFIG=folder) == ["ssh://gpu.lab.example"]
    assert urls(DOCKER_CONFIG=folder, DOCKER_CONTEXT="default")[0] == "unix:///var/run/docker.sock"


def test_else_the_sockets_docker_s_before_podman_s(tmp_path: Path) -> None:
    assert urls(DOCKER_CONFIG=str(tmp_path), XDG_RUNTIME_DIR="/run/user/7") == [
        "unix:///var/run/docker.sock",
        "unix:///run/user/7/docker.sock",
        "unix:///run/user/7/podman/podman.sock",
        "unix:///run/podman/podman.sock",
    ]


def test_a_context_that_is_gone_is_named(config: Path) -> None:
    with pytest.raises(UnavailableError, match=r"DOCKER_CONTEXT=gone.*docker context ls"):
        urls(DOCKER_CONFIG=str(config), DOCKER_CONTEXT="gone")


def failure(url: str) -> str:
    with pytest.raises(UnavailableError) as error, connect(url):
        pass
    assert error.value.exit_code == 78
    return str(error.value)


def test_an_absent_socket(tmp_path: Path) -> None:
    assert f"(--engine): {tmp_path}/none.sock is not there" in failure(
        f"unix://{tmp_path}/none.sock"
    )


def test_a_socket_that_nobody_listens_on(tmp_path: Path) -> None:
    path = tmp_path / "stale.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    assert "the engine was stopped" in failure(f"unix://{path}")


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_a_socket_without_permission(tmp_path: Path) -> None:
    path = tmp_path / "docker.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        path.chmod(0o600)
        for folder in (tmp_path, *tmp_path.parents):
            if folder.stat().st_uid == 0 and "pytest" in folder.name:
                folder.chmod(0o755)
        os.seteuid(65534)
        try:
            message = failure(f"unix://{path}")
        finally:
            os.seteuid(0)
    assert "you may not use it" in message
    assert "usermod -aG docker" in message


def test_something_that_is_no_engine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert "nothing answers at" in failure(f"tcp://127.0.0.1:{port}")
    assert "could not be used" in failure("gopher://reg.example")


def test_of_several_places_the_ones_that_are_there_are_explained() -> None:
    docker, podman = (
        Candidate(f"unix:///run/{name}.sock", name, chosen=False) for name in ("docker", "podman")
    )
    absent = explain(docker, FileNotFoundError(2, "no"))
    forbidden = explain(podman, PermissionError(13, "no"))
    assert "usermod" in no_engine([(docker, absent), (podman, forbidden)])
    assert "/run/docker.sock" not in no_engine([(docker, absent), (podman, forbidden)])
    message = no_engine([(docker, absent), (podman, absent)])
    assert "/run/docker.sock, /run/podman.sock" in message
    assert "Install Docker" in message
