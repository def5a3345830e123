"""What is a secret: one list, wherever something is shown, recorded or kept."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli import toolkit
from toolkit.common.secrets import hide_logins, is_secret

if TYPE_CHECKING:
    from pathlib import Path

SECRET = [
    *("WANDB_API_KEY", "HF_TOKEN", "GITHUB_TOKEN", "NGC_API_KEY", "AWS_SECRET_ACCESS_KEY"),
    *("AWS_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "MY_PRIVATE_KEY", "DB_PASS", "PGPASSWORD", "SSHPASS"),
    *("GITHUB_PAT", "REGISTRY_AUTH", "COMET_KEY", "MYSQL_PWD", "JWT", "SENTRY_DSN", "KEY_2"),
    *("token", "apiToken", "db_passwd", "CLIENT_SECRET", "AZURE_CREDENTIALS", "SSH_PASSPHRASE"),
]
PLAIN = [
    *(
        "TOKENIZERS_PARALLELISM",
        "MAX_TOKENS",
        "PATH",
        "PWD",
        "OLDPWD",
        "HOME",
        "KEYBOARD",
        "MONKEY",
    ),
    *("BYPASS", "COMPASS", "SSH_AUTH_SOCK", "PATTERN", "AUTHOR", "NCCL_DEBUG", "PASSES", "LR"),
    *("KEY_FILE", "WANDB_API_KEY_FILE", "HF_TOKEN_PATH", "SECRETS_DIR", "GOOGLE_CREDENTIALS_FILE"),
]
VALUES = [
    "postgres://user:pw@db.example.com/x",
    "redis://:pw@cache:6379",
    "https://token@git.example.com/a.git",
    "Server=db;User=u;Password=pw",
    "host=db password=pw",
]
HARMLESS = [
    *("postgres://db.example.com/x", "https://example.com/a@b", "ssh://git@example.com/a", "a:b@c"),
    *("", "mlx5_0,mlx5_1", "--lr=0.1", "host=db password="),
]


@pytest.mark.parametrize("name", SECRET)
def test_a_name_that_says_so(name: str) -> None:
    assert is_secret(name, "x")


@pytest.mark.parametrize("name", PLAIN)
def test_a_name_that_only_sounds_so(name: str) -> None:
    assert not is_secret(name, "x")


@pytest.mark.parametrize("value", VALUES)
def test_a_value_with_a_login_in_it(value: str) -> None:
    assert is_secret("DATABASE_URL", value)


@pytest.mark.parametrize("value", HARMLESS)
def test_a_value_without_one(value: str) -> None:
    assert not is_secret("DATABASE_URL", value)


WORD = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=6)


@given(
    before=st.text(max_size=9), user=WORD, password=WORD, scheme=st.sampled_from(["https", "redis"])
)
def test_no_password_of_a_url_survives(before: str, user: str, password: str, scheme: str) -> None:
    url = f"{scheme}://{user}:{password}@host.example.com/x"
    assert is_secret("X", url)
    shown = hide_logins(f"{before} {url}")
    assert shown == f"{hide_logins(before)} {scheme}://***@host.example.com/x"


@pytest.mark.parametrize(
    "variable", ["MY_PRIVATE_KEY=hunter2", "DATABASE_URL=postgres://u:hunter2@db/x"]
)
@pytest.mark.parametrize(
    "command", [("run", "--on", "local"), ("run", "--on", "slurm"), ("submit", "--on", "slurm")]
)
def test_it_is_neither_printed_nor_kept(
    tmp_path: Path, variable: str, command: tuple[str, ...]
) -> None:
    ran = toolkit(tmp_path, *command, "--dry-run", "--env", variable, "--env=A=b", "--", "true")
    assert ran.returncode == 0, ran.stderr
    assert "hunter2" not in ran.stdout + ran.stderr
    assert "A=b" in ran.stdout
    if command[0] == "submit":
        return
    ran = toolkit(tmp_path, "run", "--on=local", "--env", variable, "--", "true")
    assert ran.returncode == 0, ran.stderr
    found = subprocess.run(
        ["grep", "-rl", "hunter2", tmp_path], capture_output=True, text=True, check=False
    )
    assert found.stdout == ""


@pytest.mark.parametrize("argument", ["AWS_ACCESS_KEY=hunter2", "INDEX=https://u:hunter2@pypi/x"])
def test_it_is_no_build_argument(tmp_path: Path, argument: str) -> None:
    (tmp_path / "Dockerfile").write_text("FROM scratch\n")
    ran = toolkit(tmp_path, "build", "--dry-run", "--build-arg", argument)
    assert ran.returncode == 2
    assert argument.partition("=")[0] in ran.stderr
    assert "hunter2" not in ran.stdout + ran.stderr
