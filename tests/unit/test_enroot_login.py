"""``toolkit login`` against a registry in this process: the file, the check, no secret shown."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.registry import serve
from toolkit.enroot import registry
from toolkit.enroot.credentials import Entry
from toolkit.enroot.registry import parse_challenge
from toolkit.errors import CredentialsError, ImportImageError
from toolkit.image.reference import parse

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Toolkit = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "enroot" / ".credentials"


@pytest.fixture
def login(tmp_path: Path) -> Toolkit:
    def run(*arguments: str, secret: str = "") -> subprocess.CompletedProcess[str]:
        env = {
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "ENROOT_CONFIG_PATH": str(tmp_path / "enroot"),
            "ENROOT_ALLOW_HTTP": "yes",
            "DOCKER_CONFIG": str(tmp_path / "docker"),
        }
        command = [sys.executable, "-c", "from toolkit.cli import main; main()", "login"]
        return subprocess.run(
            [*command, *arguments],
            env=env,
            input=secret,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_a_token_server_on_another_host_gets_its_line(login: Toolkit, file: Path) -> None:
    with serve("bearer") as server:
        done = login(server.host, "-u", "ci", "--password-stdin", secret="hunter2\n")
        assert done.returncode == 0, done.stderr
        assert file.read_text() == (
            "machine 127.0.0.1 login ci password hunter2\n"
            "machine localhost login ci password hunter2\n"
        )
        assert file.stat().st_mode & 0o777 == 0o600
        assert "hunter2" not in done.stdout + done.stderr
        checked = login("--check", server.host)
        assert (checked.returncode, checked.stdout.split()[0]) == (0, "ok"), checked.stdout


@pytest.mark.parametrize("scheme", ["basic", "bearer"])
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("machine 127.0.0.1 login ci password wrong\n", "refuses the user name or password"),
        ("machine h.example.com login ci password hunter2\n", "no line is for machine 127.0.0.1"),
    ],
    ids=["wrong_password", "wrong_machine"],
)  # fmt: skip
def test_a_wrong_machine_is_told_apart_from_a_wrong_password(
    login: Toolkit,
    file: Path,
    scheme: str,
    text: str,
    told: str,
) -> None:
    file.parent.mkdir()
    file.write_text(text + text.replace("127.0.0.1", "localhost"))
    file.chmod(0o600)
    with serve(scheme) as server:
        checked = login("--check", server.host)
    assert checked.returncode == CredentialsError.exit_code
    assert told in checked.stdout
    assert "wrong\n" not in checked.stdout
    assert "hunter2" not in checked.stdout + checked.stderr


def test_a_missing_line_for_the_token_server_is_told(login: Toolkit, file: Path) -> None:
    file.parent.mkdir()
    file.write_text("machine 127.0.0.1 login ci password hunter2\n")
    file.chmod(0o600)
    with serve("bearer") as server:
        checked = login("--check", server.host)
    assert checked.returncode == CredentialsError.exit_code
    assert "token server is localhost, and no line is for machine localhost" in checked.stdout


def test_a_login_is_taken_from_docker_and_checked(login: Toolkit, tmp_path: Path) -> None:
    with serve("basic") as server:
        auth = base64.b64encode(b"ci:hunter2").decode()
        (tmp_path / "docker").mkdir()
        config = tmp_path / "docker" / "config.json"
        config.write_text(json.dumps({"auths": {f"http://{server.host}/v2/": {"auth": auth}}}))
        done = login(server.host)
        assert done.returncode == 0, done.stderr
        assert str(config) in done.stderr
        assert "hunter2" not in done.stderr
        assert login("--check").stdout.startswith("warn")  # the file cannot say which port it is
        assert login("--check", server.host).returncode == 0


def test_case_7_6_a_literal_ecr_token_is_taken_with_a_warning(login: Toolkit, file: Path) -> None:
    host = "111122223333.dkr.ecr.us-west-2.amazonaws.com"
    done = login(host, "--password-stdin", secret="token\n")
    assert "expires" in done.stderr
    assert file.read_text() == f"machine {host} login AWS password token\n"
    done = login(host)
    assert file.read_text() == (
        f"machine {host} login AWS password $(aws ecr get-login-password --region us-west-2)\n"
    )


def test_case_7_2_ngc(login: Toolkit, file: Path) -> None:
    done = login("nvcr.io", "--password-stdin", secret="nvapi-secret\n")
    assert file.read_text().splitlines() == [
        "machine nvcr.io login $oauthtoken password nvapi-secret",
        "machine authn.nvidia.com login $oauthtoken password nvapi-secret",
    ]
    assert "nvapi-secret" not in done.stdout + done.stderr


def test_without_a_login_and_a_terminal_it_says_how(login: Toolkit, file: Path) -> None:
    with serve() as server:
        done = login(server.host)
    assert done.returncode == CredentialsError.exit_code
    assert "--password-stdin" in done.stderr
    assert not file.exists()


def test_a_password_command_that_fails_is_the_finding(login: Toolkit, file: Path) -> None:
    file.parent.mkdir()
    file.write_text("machine 127.0.0.1 login ci password $(exit 3)\n")
    file.chmod(0o600)
    with serve("basic") as server:
        checked = login("--check", server.host)
    assert checked.returncode == CredentialsError.exit_code
    assert "the command for the password of 127.0.0.1 gives none" in checked.stdout


@pytest.mark.parametrize(
    ("header", "scheme", "host"),
    [
        ('Bearer realm="https://auth.docker.io/token",service="r"', "bearer", "auth.docker.io"),
        ('bearer service="a,b", realm="https://h.com:84/jwt/auth"', "bearer", "h.com:84"),
        ('Basic realm="Registry Realm"', "basic", None),
        ("Basic", "basic", None),
    ],
)  # fmt: skip
def test_challenges(header: str, scheme: str, host: str | None) -> None:
    challenge = parse_challenge(header)
    assert (challenge.scheme, challenge.token_host) == (scheme, host)


def test_an_image_is_looked_up_by_tag_digest_and_architecture() -> None:
    with serve() as server:
        amd = server.image("amd", {"a": b"1"})
        arm = server.image("arm", {"a": b"2"}, architecture="arm64")
        index = server.index("1.2", {"amd64": amd, "arm64": arm})
        asked = registry.Registry(server.host, None, http=True)
        for version in (":1.2", f"@{index}"):
            found = asked.image(parse(f"{server.host}/team/img{version}"), "arm64")
            assert (found.digest, found.index) == (arm, index)
        found = asked.image(parse(f"{server.host}/team/img:amd"), "amd64")
        assert (found.digest, found.index) == (amd, None)
        assert found.size == sum(found.layers.values()) > 0
        with pytest.raises(ImportImageError, match="only for amd64, arm64"):
            asked.image(parse(f"{server.host}/team/img:1.2"), "ppc64le")
        with pytest.raises(ImportImageError, match="not in the registry"):
            asked.image(parse(f"{server.host}/team/img:none"))


def test_a_private_image_needs_the_login_and_says_so() -> None:
    with serve("bearer") as server:
        digest = server.image("1", {"a": b"1"})
        reference = parse(f"{server.host}/team/img:1")
        good = registry.Registry(server.host, Entry("localhost", "ci", "hunter2"), http=True)
        assert good.image(reference).digest == digest
        for entry in (None, Entry("localhost", "ci", "wrong")):
            with pytest.raises(CredentialsError, match="toolkit login"):
                registry.Registry(server.host, entry, http=True).image(reference)


def test_plain_http_is_named_as_the_cause() -> None:
    with serve() as server, pytest.raises(registry.Unreachable, match="ENROOT_ALLOW_HTTP"):
        registry.Registry(server.host, None, http=False).challenge()
