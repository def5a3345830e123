"""``toolkit customize`` and ``shell``: what would run, and what is refused before anything does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.jobs import decided
from tests.unit.test_enroot_import import superblock
from toolkit.enroot.customize import RECORD, Additions, install_script, make
from toolkit.enroot.site import Site
from toolkit.errors import ImportImageError, UsageError
from toolkit.targets import slurm

if TYPE_CHECKING:
    from toolkit.plan import Plan

FAKES = {"apt-get": "", "python": "", "mktemp": 'mkdir -p "$FOLDER/w"; echo "$FOLDER/w"'}


def run_script(folder: Path, script: str) -> tuple[int, list[str]]:
    """Run it as in a container, its package managers noting how they were called."""
    programs = folder / "bin"
    programs.mkdir()
    calls = folder / "calls"
    for name, body in FAKES.items():
        program = programs / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >>"{calls}"\n{body}\n')
        program.chmod(0o755)
    script = script.replace(RECORD, str(folder / "record")).replace("/var/", f"{folder}/var/")
    env = {"PATH": f"{programs}:{os.environ['PATH']}", "FOLDER": str(folder)}
    ran = subprocess.run(["sh", "-c", script], env=env, check=False, capture_output=True)
    lines = calls.read_text().splitlines() if calls.exists() else []
    return ran.returncode, [line for line in lines if not line.startswith("mktemp")]


def test_packages_and_scripts_go_in_in_order(tmp_path: Path) -> None:
    added = Additions(
        apt=("git", "g++"),
        pip=("torch>=2.1", "it's"),
        requirements="numpy\n",
        script=f'echo script "$0" >>"{tmp_path}/calls"\n',
    )
    code, calls = run_script(tmp_path, install_script(added, {"from": "x"}))
    assert code == 0
    assert [" ".join(call.split()[:4]) for call in calls] == [
        "apt-get update",
        "apt-get install --yes --no-install-recommends",
        "python -m pip --version",
        "python -m pip install",
        "python -m pip check",
        f"script {tmp_path}/w/script",
    ]
    assert calls[3].endswith(f"torch>=2.1 it's --requirement {tmp_path}/w/requirements.txt")
    assert (tmp_path / "record").read_text() == '{"from": "x"}\n'


@pytest.mark.parametrize("script", ["false\ntrue\n", "#!/bin/sh\nexit 3\n"])
def test_a_script_that_fails_stops_it_before_the_record(tmp_path: Path, script: str) -> None:
    code, _ = run_script(tmp_path, install_script(Additions(script=script), {}))
    assert code != 0
    assert not (tmp_path / "record").exists()


def test_no_login_of_a_package_index_is_recorded() -> None:
    secret = "--index-url https://ci:hunter2@pypi.example.com/simple"
    added = Additions(requirements=f"{secret}\nnumpy\n", pip=(secret,))
    assert "hunter2" not in str(added.as_dict())
    assert "pypi.example.com" in str(added.as_dict())
    assert "hunter2" in install_script(added, {})  # pip needs it


SITE = Site(None, (), {"ENROOT_DATA_PATH": "/"})


@pytest.mark.parametrize(
    ("target", "words"),
    [("new.img", ".sqsh"), ("old.sqsh", "--force"), ("none/new.sqsh", "no directory")],
)
def test_what_cannot_be_made_is_told_first(tmp_path: Path, target: str, words: str) -> None:
    source = tmp_path / "old.sqsh"
    source.write_bytes(superblock(4096).ljust(4096))
    with pytest.raises(UsageError, match=words):
        customize(source, tmp_path / target)


def test_a_damaged_source_is_told_first(tmp_path: Path) -> None:
    source = tmp_path / "old.sqsh"
    source.write_bytes(superblock(4096).ljust(100))
    with pytest.raises(ImportImageError, match="cut short"):
        customize(source, tmp_path / "new.sqsh")


def test_the_login_nodes_software_does_not_reach_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tmp_path / "seen"
    enroot = tmp_path / "enroot"
    enroot.write_text(f'#!/bin/sh\nenv >>"{seen}"\nexit 1\n')
    enroot.chmod(0o755)
    monkeypatch.setattr("toolkit.enroot.customize.check_space", lambda *_: None)
    (tmp_path / "old.sqsh").write_bytes(superblock(4096).ljust(4096))
    names = ("PYTHONUSERBASE", "PYTHONSTARTUP", "LD_AUDIT", "CONDA_PREFIX", "PYTHONHOME")
    leaks = dict.fromkeys(names, "leaked")
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": "/h", "KEPT": "1", **leaks}
    with pytest.raises(ImportImageError, match="was not made"):
        customize(tmp_path / "old.sqsh", tmp_path / "new.sqsh", environ)
    text = seen.read_text()
    assert "KEPT=1" in text
    assert "leaked" not in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["enroot", "old.sqsh", "seen"]


def customize(source: Path, target: Path, environ: dict[str, str] | None = None) -> None:
    make(
        source, target, Additions(pip=("x",)),
        site=SITE, environ=environ or {}, say=lambda _: None, origin={},
    )  # fmt: skip


def test_nothing_to_add_is_an_error(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from toolkit.cli import main; main()", "customize"]
    ran = subprocess.run(
        [*command, "--from=a.sqsh", "-o", "b.sqsh"],
        check=False, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 2
    assert "nothing to add" in ran.stderr


# ---- the shell


def compose(*, terminal: bool = True, environ: dict[str, str] | None = None, **job: Any) -> Plan:
    image = {"container_image": "nvcr.io/nvidia/pyg:24.01-py3", "command": ("sh",)}
    given = {**image, "job_name": "job", **job}
    return slurm.shell_plan(decided(environ, cwd=Path("/home/u"), **given), terminal=terminal)


def test_a_shell_is_one_task_with_the_jobs_image_and_mounts() -> None:
    made = compose(nodes=4, ntasks_per_node=8, gpus_per_node=1, partition="gpu", time=3600)
    assert made.processes[0].argv == (
        "srun",
        "--nodes=1",
        "--ntasks=1",
        "--partition=gpu",
        "--time=0-01:00:00",
        "--job-name=job",
        "--gpus-per-node=1",
        "--pty",
        "--container-image=nvcr.io#nvidia/pyg:24.01-py3",
        "--container-mounts=/home/u:/workspace",
        "--container-workdir=/workspace",
        "--no-container-mount-home",
        "sh",
    )


def test_without_a_terminal_none_is_asked_for() -> None:
    assert "--pty" not in compose(terminal=False).processes[0].argv


def test_in_an_allocation_it_is_a_step_and_the_login_nodes_python_stays_out() -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "PYTHONHOME": "/opt", "RANK": "3"}
    made = compose(environ=environ, partition="gpu")
    assert "--partition=gpu" not in made.processes[0].argv
    assert {"SLURM_NTASKS", "PYTHONHOME", "RANK"} <= set(made.unset)
    assert "SLURM_JOB_ID" not in made.unset


def test_a_variable_of_the_users_wins_over_the_images() -> None:
    made = compose(env=(("A", "b"),))
    assert "--container-env=A" in made.processes[0].argv
