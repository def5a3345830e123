"""The packed entrypoint: the same everywhere, whole or not there, and hard to break."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from toolkit.pyz import write_entrypoint

VERSIONS = ["3.8", "3.9", "3.10", "3.11", "3.12", "3.13", "3.14"]


@pytest.fixture(scope="module")
def pyz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pyz") / "entrypoint.pyz"
    write_entrypoint(path)
    return path


def find_python(version: str) -> str | None:
    """An interpreter of ``version`` on PATH or under pyenv that really starts."""
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python3"))
    for candidate in [shutil.which(f"python{version}"), *map(str, pyenv)]:
        if candidate:
            code = "import sys; print('%d.%d' % sys.version_info[:2])"
            done = subprocess.run([candidate, "-c", code], capture_output=True, check=False)
            if done.stdout.decode().strip() == version:
                return candidate
    return None


@pytest.mark.parametrize("version", VERSIONS)
def test_every_python_runs_it(pyz: Path, version: str) -> None:
    python = find_python(version)
    if python is None:
        pytest.skip(f"no Python {version} on this machine")
    step = {
        "SLURM_JOB_ID": "501",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
        "SLURM_STEP_NODELIST": "node[01-02]",
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "1",
    }
    launches = [
        (step, 8),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a"}, 8),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, 1),
        ({"SLURM_TASKS_PER_NODE": "1(x2)"}, 1),
    ]
    for environ, size in launches:
        shown = subprocess.run(
            [python, "-I", "-S", pyz, "--show"], env=environ, capture_output=True, check=True
        )
        assert json.loads(shown.stdout)["world_size"] == size
    run_dir = pyz.parent / f"run-{version}"
    local = {**step, "TOOLKIT_TARGET": "local", "TOOLKIT_RUN_DIR": str(run_dir)}
    local.update(MASTER_ADDR="localhost", PATH="/usr/bin:/bin")
    done = subprocess.run(
        [python, "-I", "-S", pyz, "--", "sh", "-c", "echo $RANK; exit 3"],
        env=local,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, b"5\n", b"")
    assert json.loads((run_dir / "ranks" / "5.json").read_text())["rank"] == 5
    wrong = subprocess.run(
        [python, "-I", "-S", pyz, "--show"], env={"RANK": "1"}, capture_output=True, check=False
    )
    assert wrong.returncode == 71
    assert wrong.stderr.startswith(b"toolkit: rank 1: RANK='1' but not WORLD_SIZE and LOCAL_RANK")


def test_nothing_of_the_users_can_break_it(pyz: Path, tmp_path: Path) -> None:
    for name in ("toolkit", "json", "os", "zipimport"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the wrong one')\n")
    (tmp_path / "sitecustomize.py").write_text("raise SystemExit('the wrong one')\n")
    environ = {
        "PYTHONHOME": "/nonexistent",
        "PYTHONPATH": str(tmp_path),
        "PYTHONSTARTUP": str(tmp_path / "sitecustomize.py"),
        "PYTHONIOENCODING": "nonsense",
        "PYTHONOPTIMIZE": "2",
        "PYTHONDEVMODE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-I", "-S", pyz, "--show"],
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        check=True,
    )
    assert json.loads(done.stdout)["world_size"] == 1
    assert done.stderr == b""


def test_it_writes_nothing_and_needs_no_home(tmp_path: Path) -> None:
    path = tmp_path / "entrypoint.pyz"
    write_entrypoint(path)
    subprocess.run(
        [sys.executable, "-I", "-S", path, "--", "/bin/true"], env={}, cwd="/", check=True
    )
    assert list(tmp_path.iterdir()) == [path]


def test_it_can_be_run_through_a_path_with_spaces_and_a_link(pyz: Path, tmp_path: Path) -> None:
    folder = tmp_path / "my runs, ö"
    folder.mkdir()
    (folder / "link.pyz").symlink_to(pyz)
    done = subprocess.run(
        [sys.executable, "-I", "-S", folder / "link.pyz", "--hostlist", "n[1-2]"],
        capture_output=True,
        check=True,
    )
    assert done.stdout == b"n1\nn2\n"


def test_the_same_sources_give_the_same_bytes(pyz: Path, tmp_path: Path) -> None:
    code = "import sys, pathlib, toolkit.pyz as p; p.write_entrypoint(pathlib.Path(sys.argv[1]))"
    for number in range(2):
        path = tmp_path / f"{number}.pyz"
        subprocess.run([sys.executable, "-c", code, path], check=True)
        assert path.read_bytes() == pyz.read_bytes()
    with zipfile.ZipFile(pyz) as archive:
        assert not [name for name in archive.namelist() if name.startswith("/") or ".." in name]
        for name in archive.namelist():
            if name.endswith(".pyc"):  # no path of the machine that packed it
                assert str(Path.cwd()).encode() not in archive.read(name)


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "entrypoint.pyz"
    target.mkdir()
    with pytest.raises(OSError, match="directory"):
        write_entrypoint(target)
    assert list(tmp_path.iterdir()) == [target]


def test_an_old_file_is_replaced_whole(tmp_path: Path) -> None:
    target = tmp_path / "entrypoint.pyz"
    target.write_text("old")
    write_entrypoint(target)
    assert zipfile.is_zipfile(target)
    assert target.stat().st_mode & 0o777 == 0o644


def test_the_start_imports_the_standard_library_only() -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-X", "importtime", "-m", "toolkit.entrypoint", "--show"],
        capture_output=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    lines = done.stderr.decode().splitlines()
    modules = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    modules -= {"imported package"}
    assert "toolkit.entrypoint" in modules
    outside = {name for name in modules if name.partition(".")[0] not in sys.stdlib_module_names}
    assert {name.partition(".")[0] for name in outside} == {"toolkit"}


HEAVY = {"argparse", "ast", "dataclasses", "enum", "json", "pathlib", "re", "signal", "socket"}
HEAVY |= {"subprocess", "threading", "typing", "tokenize", "inspect", "shutil", "tempfile"}


def test_the_start_imports_nothing_heavy(pyz: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-X", "importtime", pyz, "--", "/bin/true"],
        env={},
        capture_output=True,
        check=True,
    )
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.decode().splitlines()}
    assert "toolkit.entrypoint.checks" in modules
    assert not modules & HEAVY
