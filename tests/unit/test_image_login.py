"""Logins: a given one wins; stored ones are found whatever their form; helpers may be missing."""

from __future__ import annotations

import base64
import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from toolkit.image.login import Login, find

if TYPE_CHECKING:
    from pathlib import Path

AUTH = base64.b64encode(b"ci:hunter2").decode()
LOGIN = {"username": "ci", "password": "hunter2"}


class Docker:
    """A folder with a docker configuration, and one with credential helpers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {
            "DOCKER_CONFIG": str(folder),
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        }
        (folder / "bin").mkdir()

    def config(self, **config: Any) -> None:
        (self.folder / "config.json").write_text(json.dumps(config))

    def helper(self, name: str, script: str) -> None:
        program = self.folder / "bin" / f"docker-credential-{name}"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    def find(self, registry: str, given: tuple[str, str] | None = None) -> Login:
        return find(registry, given, self.environ)


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Docker:
    found = Docker(tmp_path)
    monkeypatch.setenv("PATH", found.environ["PATH"])
    return found


def test_case_7_4_a_given_login_goes_with_the_push_whatever_is_stored(docker: Docker) -> None:
    docker.config(credsStore="desktop", auths={"reg.example.com": {}})
    login = docker.find("reg.example.com", ("ci", "hunter2"))
    assert login.auth_config == LOGIN
    assert not login.problem
    assert "user name and password that were given" in login.advice()


@pytest.mark.parametrize(
    "key",
    [
        "reg.example.com",
        "https://reg.example.com",
        "https://reg.example.com/v1/",
        "reg.example.com/v2",
    ],
)
def test_case_7_4_a_stored_key_may_have_a_scheme_and_a_path(docker: Docker, key: str) -> None:
    docker.config(auths={key: {"auth": AUTH}})
    assert docker.find("reg.example.com").auth_config == LOGIN
    assert docker.find("other.example.com").auth_config == {}


def test_case_7_4_a_refused_stored_token_is_named_with_its_registry(docker: Docker) -> None:
    docker.config(credsStore="desktop", auths={"reg.example.com": {}})
    docker.helper("desktop", 'echo \'{"Username": "<token>", "Secret": "expired-token"}\'')
    login = docker.find("reg.example.com")
    assert login.auth_config == {"identitytoken": "expired-token"}
    assert (
        "reg.example.com is from docker-credential-desktop: it may have expired" in login.advice()
    )


def test_docker_hub_has_a_key_of_its_own(docker: Docker) -> None:
    docker.config(auths={"https://index.docker.io/v1/": {"auth": AUTH}})
    assert docker.find("docker.io").auth_config == LOGIN
    docker.config(credsStore="desktop")
    docker.helper(
        "desktop", 'read -r url; echo "{\\"Username\\": \\"$url\\", \\"Secret\\": \\"s\\"}"'
    )
    assert docker.find("docker.io").auth_config["username"] == "https://index.docker.io/v1/"
    assert docker.find("reg.example.com").auth_config["username"] == "reg.example.com"


def test_a_registry_s_own_helper_comes_before_the_general_one(docker: Docker) -> None:
    docker.config(credsStore="general", credHelpers={"https://reg.example.com": "ecr"})
    docker.helper("ecr", 'echo \'{"Username": "AWS", "Secret": "s"}\'')
    assert docker.find("reg.example.com").auth_config["username"] == "AWS"


def test_a_missing_helper_is_named_when_a_registry_refuses(docker: Docker) -> None:
    docker.config(credsStore="desktop")
    login = docker.find("reg.example.com")
    assert login.auth_config == {}
    assert "docker-credential-desktop, which is not installed" in login.advice()
    assert "--password-stdin" in login.advice()


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("echo credentials not found in native keychain; exit 1", ""),
        ("echo the keychain is locked; exit 1", "the keychain is locked"),
        ("echo hello", "gave no login"),
        ('echo \'{"Username": "", "Secret": ""}\'', ""),
    ],
)
def test_a_helper_that_gives_nothing(docker: Docker, script: str, problem: str) -> None:
    docker.config(credsStore="odd")
    docker.helper("odd", script)
    login = docker.find("reg.example.com")
    assert login.auth_config == {}
    assert problem in login.problem
    assert bool(login.problem) is bool(problem)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"auths": {"reg.example.com": {"auth": "!"}}}', '{"auths": 3}']
)
def test_a_damaged_configuration_is_named_not_a_traceback(docker: Docker, text: str) -> None:
    (docker.folder / "config.json").write_text(text)
    login = docker.find("reg.example.com")
    assert "config.json" in login.advice()


def test_no_configuration_is_no_login(docker: Docker) -> None:
    assert docker.find("reg.example.com") == Login("reg.example.com")


def test_a_login_does_not_show_its_secret(docker: Docker) -> None:
    login = docker.find("reg.example.com", ("ci", "hunter2"))
    assert "hunter2" not in f"{login!r} {login.advice()}"
