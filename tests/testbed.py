"""What the tiers that need a cluster share: starting it, using it, leaving it as it was found."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

TESTBED = Path(__file__).parents[1] / "ci" / "testbed"
CANNOT = 3  # ci/testbed: this machine cannot have it, as against: it went wrong
LIMIT = 60.0  # seconds that a command on the test bed may take


def sourced(env_file: Path) -> dict[str, str]:
    """The environment after ``. env_file`` in a shell."""
    script = f'. "{env_file}" && env -0'
    output = subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True)
    return dict(item.split("=", 1) for item in output.stdout.split("\0") if item)


@contextlib.contextmanager
def slurm_testbed() -> Iterator[None]:
    """Bring the Slurm test bed up, or use the one that is, with its variables in ``os.environ``.

    ``TOOLKIT_TESTBED_RELEASE`` asks for a release. What was not up before is down afterwards,
    unless ``TOOLKIT_TESTBED_KEEP=1``.
    """
    was_up = subprocess.run([TESTBED / "status", "slurm"], check=False).returncode == 0
    release = os.environ.get("TOOLKIT_TESTBED_RELEASE")
    asked = ["--release", release] if release else []
    up = subprocess.run(
        [TESTBED / "up", "slurm", *asked], check=False, stderr=subprocess.PIPE, text=True
    )
    sys.stderr.write(up.stderr)
    if up.returncode == CANNOT:
        pytest.skip(up.stderr.strip().splitlines()[-1].removeprefix("testbed: "))
    up.check_returncode()
    before = dict(os.environ)
    os.environ.update(sourced(TESTBED / "env"))
    if not was_up:
        os.environ["TOOLKIT_TESTBED_STARTED_BY"] = str(os.getpid())
    else:
        end_leftovers()
    shared = os.environ["TOOLKIT_TESTBED_SHARED"] + f"/tests-{uuid.uuid4().hex[:8]}"
    os.environ["TOOLKIT_TESTBED_SHARED"] = shared
    make_shared()
    try:
        yield
    finally:
        shutil.rmtree(shared, ignore_errors=True)
        os.environ.clear()
        os.environ.update(before)
        if not was_up and os.environ.get("TOOLKIT_TESTBED_KEEP") != "1":
            subprocess.run([TESTBED / "down", "slurm"], check=True)


def make_shared() -> None:
    """Make the folder of this run of the tests, which nothing of an earlier one is in."""
    folder = Path(os.environ["TOOLKIT_TESTBED_SHARED"])
    folder.mkdir(exist_ok=True)
    folder.chmod(0o1777)


def end_leftovers() -> None:
    """End what an aborted run of the tests left on a cluster that is up: jobs, and a setting."""
    for user in ("root", "tester"):
        subprocess.run(["scancel", f"--user={user}"], check=False, timeout=LIMIT)
    for conf in Path(os.environ["SLURM_CONF"]).parent.glob("enroot.conf.d/50-http.conf"):
        conf.unlink()


def run(
    *command: str | Path, user: str = "root", limit: float = LIMIT, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a command on the login node as ``user``, in the directory that all nodes share.

    Args:
        command: The command, such as ``"srun", "-N2", "hostname"``.
        user: ``root``, or the test bed's ordinary user.
        limit: how long it may take, in seconds.
        env: Variables to add to the environment.

    Raises:
        subprocess.TimeoutExpired: After ``limit`` seconds: an srun can wait for ever.
    """
    account = pwd.getpwnam(user)
    login = {"HOME": account.pw_dir, "USER": user, "LOGNAME": user}
    return subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        timeout=limit,
        cwd=os.environ["TOOLKIT_TESTBED_SHARED"],
        env={**os.environ, **login, **env},
        user=account.pw_uid,
        group=account.pw_gid,
        extra_groups=[account.pw_gid],
    )
