"""The house: rooms import downward only; what is decided in one place is spelled there alone."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINTER = Path(sys.executable).with_name("lint-imports")
COPIED = ("toolkit", "workloads", "pyproject.toml")


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    if not LINTER.exists():
        pytest.skip("import-linter is not installed")
    command = [str(LINTER), "--no-logo", "--no-cache"]
    env = {"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin", "COLUMNS": "200"}
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.fixture
def house(tmp_path: Path) -> Path:
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name)
        else:
            shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "line", "says"),
    [
        (
            "run_dir.py",
            "from toolkit.commands import display",
            "toolkit.run_dir -> toolkit.commands",
        ),
        ("slurm/srun.py", "from toolkit import decide", "toolkit.slurm.srun -> toolkit.decide"),
        ("common/lock.py", "from toolkit import plan", "toolkit.common.lock -> toolkit.plan"),
        (
            "entrypoint/start.py",
            "import toolkit.errors",
            "toolkit.entrypoint.start -> toolkit.errors",
        ),
        (
            "targets/local.py",
            "from toolkit.targets import docker",
            "local -> toolkit.targets.docker",
        ),
        (
            "enroot/site.py",
            "    from toolkit.slurm import probe",
            "enroot.site -> toolkit.slurm.probe",
        ),
    ],
)
def test_a_planted_upward_import_is_named(house: Path, file: str, line: str, says: str) -> None:
    path = house / "toolkit" / file
    planted = f"if 1:\n{line}\n" if line.startswith(" ") else f"{line}\n"
    path.write_text(path.read_text() + planted)
    ran = lint(house)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert says in ran.stdout


def test_a_room_that_has_no_place_is_named(house: Path) -> None:
    (house / "toolkit" / "attic.py").write_text("")
    ran = lint(house)
    assert ran.returncode == 1
    assert "attic" in ran.stdout


def test_the_rooms_as_they_are_hold(house: Path) -> None:
    ran = lint(house)
    assert ran.returncode == 0, ran.stdout


def test_the_table_of_rooms_is_what_is_checked() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = contracts["contracts"][0]["layers"]
    checked = [name for layer in layers for name in layer.split(" | ")]
    rows = re.findall(
        r"^\| (`toolkit\..*?) \|", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE
    )
    written = [name for row in rows for name in re.findall(r"`toolkit\.(\w+)`", row)]
    assert written == checked


#: What may be spelled in one file of the product, and there alone.
ONCE = {
    "the pattern of a rank's log": (
        r"rank-(\{|%|\*|\d)|rank-\"|f\"\{task\}-|-\{number\}\.log",
        "toolkit/entrypoint/run_files.py",
    ),
    "names in a run directory": (
        r"[\"'/](run\.json|result\.json|metrics\.jsonl|batch\.sh|srun\.log)[\"']",
        "toolkit/entrypoint/run_files.py",
    ),
    "names of secrets": (r"PASSW|PRIVATE_\?KEY|API_\?KEY", "toolkit/common/secrets.py"),
    "the codes of Slurm's states": (
        r"[\"'](TIMEOUT|OUT_OF_MEMORY|BOOT_FAIL)[\"']: ",
        "toolkit/entrypoint/codes.py",
    ),
    "how a recorded process is recognised": (
        r"boot_id|/proc/\{pid\}|os\.kill\([^)]*, 0\)",
        "toolkit/entrypoint/processes.py",
    ),
    "whole-file writes": (r"os\.replace|mkstemp", "toolkit/entrypoint/run_files.py"),
    "what of a login node stays out": (
        r"PYTHONSTARTUP|LD_AUDIT",
        "toolkit/common/environment.py",
    ),
    "a captured command": (r"capture_output=True", "toolkit/common/capture.py"),
}
#: It runs inside of an image that knows nothing of this project.
ALONE = {"toolkit/image/checks.py"}


@pytest.mark.parametrize("fact", ONCE)
def test_a_fact_is_spelled_in_one_place(fact: str) -> None:
    pattern, place = ONCE[fact]
    found = set()
    for room in ("toolkit", "workloads"):
        for path in (ROOT / room).rglob("*.py"):
            code = re.sub(r'"""[\s\S]*?"""|#.*', "", path.read_text())
            if re.search(pattern, code):
                found.add(path.relative_to(ROOT).as_posix())
    assert found - ALONE == {place}
