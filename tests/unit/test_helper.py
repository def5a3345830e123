"""Jobs beside the training: what they ask Slurm for, and what their containers are kept from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli import toolkit
from toolkit.common.capture import capture
from toolkit.common.environment import LOGIN_NODE, left_out
from toolkit.config import Setting
from toolkit.options import table
from toolkit.slurm import helper

if TYPE_CHECKING:
    from pathlib import Path

TRAINING = """
[job]
container-image = "registry.example.com/team/pyg:1"
nodes = 8
gpus-per-node = 8
time = "12:00:00"
mem = "900G"
partition = "gpu"
account = "gnn"
qos = "high"
srun-arg = ["--reservation=workshop", "--gres=gpu:8", "--mpi=pmix", "-t", "12:00:00"]
"""
SITES = {"--partition=gpu", "--account=gnn", "--qos=high", "--reservation=workshop"}


@pytest.mark.parametrize(
    "command",
    [
        ("import", "--on", "slurm", "--dry-run"),
        ("import", "--on", "slurm", "--dry-run", "registry.example.com/other:2"),
    ],
)
def test_an_import_asks_for_what_it_needs_and_what_the_site_wants(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    (tmp_path / "toolkit.toml").write_text(TRAINING)
    ran = toolkit(tmp_path, *command)
    assert ran.returncode == 0, ran.stderr
    line = ran.stdout.splitlines()[-1].split()
    flags = set(line[1 : line.index("enroot")])
    assert flags == {*SITES, "--nodes=1", "--ntasks=1", "--job-name=toolkit-import"}


@given(st.sets(st.sampled_from(sorted(table()))))
def test_a_helper_never_asks_for_the_trainings_resources(keys: set[str]) -> None:
    given_ = {key: Setting(["--x"] if table()[key].kind is list else "v", key) for key in keys}
    argv = helper.srun_argv(given_, "toolkit-x", "--time=3")
    expected = {f"--{table()[key].slurm}=v" for key in keys if table()[key].helper}
    assert argv[:5] == ("srun", "--nodes=1", "--ntasks=1", "--job-name=toolkit-x", "--time=3")
    assert set(argv[5:]) == expected
    assert len(argv[5:]) == len(expected)


def test_what_a_job_around_it_left_does_not_reach_a_helper() -> None:
    inside = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "RANK": "1", "PATH": "/bin"}
    found = helper.helper_environment(inside)
    assert found == {"SLURM_JOB_ID": "7", "PATH": "/bin"}


def test_the_login_nodes_python_stays_out_of_every_container() -> None:
    environ = {name.rstrip("_") + ("_X" if name.endswith("_") else "") for name in LOGIN_NODE}
    assert set(left_out([*environ, "PATH", "CONDAX", "PYTHONUNBUFFERED"])) == environ
    assert "CONDA_X" not in left_out(environ, {"CONDA_X"})
    assert {"PYTHONUSERBASE", "PYTHONSTARTUP", "LD_AUDIT", "CONDA_X"} <= environ


class TestCapture:
    def test_what_it_prints(self) -> None:
        ran = capture(
            ["sh", "-c", 'cat; echo "$A" >&2'], 10, {"PATH": "/bin:/usr/bin", "A": "b"}, text="in"
        )
        assert (ran.code, ran.stdout, ran.stderr, ran.ok) == (0, "in", "b\n", True)

    def test_one_that_fails_says_why(self) -> None:
        ran = capture(["sh", "-c", "echo a >&2; echo b >&2; exit 3"], 10)
        assert (ran.code, ran.ok, ran.said()) == (3, False, "a; b")
        assert capture(["sh", "-c", "exit 3"], 10).said() == "it ended with code 3"

    def test_one_that_takes_too_long_is_ended(self) -> None:
        ran = capture(["sleep", "100"], 0.2)
        assert (ran.code, ran.said()) == (None, "sleep did not answer within 0.2 s")

    def test_one_that_is_not_there(self, tmp_path: Path) -> None:
        ran = capture(["no-such-program"], 10, {"PATH": str(tmp_path)})
        assert ran.code is None
        assert "no-such-program cannot be run" in ran.said()

    def test_bytes_that_are_no_text(self) -> None:
        assert capture(["printf", r"\377x"], 10).stdout == "�x"
