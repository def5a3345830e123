"""``toolkit login`` with real enroot: what it writes is what enroot logs in with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.registry import serve

TOOLKIT = str(Path(sys.executable).with_name("toolkit"))


@pytest.mark.parametrize("scheme", ["basic", "bearer"])
@pytest.mark.parametrize("password", ["hunter2", "$omething", "p#w'd\\n%s"])
def test_enroot_imports_a_private_image_with_the_login(
    tmp_path: Path, scheme: str, password: str
) -> None:
    own = {
        "ENROOT_ALLOW_HTTP": "yes",
        "ENROOT_CACHE_PATH": str(tmp_path / "cache"),
        "ENROOT_CONFIG_PATH": str(tmp_path / "config"),
        "DOCKER_CONFIG": str(tmp_path),
    }
    env = {**os.environ, **own}
    with serve(scheme, ("robot$team+ci", password)) as server:
        server.image("1", {"bin/true": b"#!/bin/sh\n"})
        uri = f"docker://{server.host}#team/img:1"
        command = ["enroot", "import", "-o", str(tmp_path / "made.sqsh"), uri]
        assert run(*command, env=env).returncode != 0
        subprocess.run(
            [TOOLKIT, "login", server.host, "-u", "robot$team+ci", "--password-stdin"],
            env=env, input=f"{password}\n", text=True, check=True,
        )  # fmt: skip
        checked = run(TOOLKIT, "login", "--check", server.host, env=env)
        assert checked.returncode == 0, checked.stdout
        done = run(*command, env=env)
        assert done.returncode == 0, done.stderr


def run(*command: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, check=False, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
