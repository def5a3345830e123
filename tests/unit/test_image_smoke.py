"""The smoke test's report: every check has a line, whatever happened in the container."""

from __future__ import annotations

import ast
import io
import json
import subprocess
import sys
import warnings
import xml.etree.ElementTree as ET
import zipfile
from pathlib import Path

import pytest

from toolkit.image import checks
from toolkit.image.smoke import Ended, Report, Result, _inside, names, pack

INSIDE = [name for name, _ in checks.CHECKS["all"]]


def printed(*done: str) -> str:
    items = [{"check": name, "ok": True, "detail": "fine", "seconds": 0.5} for name in done]
    lines = ["a banner", "[1, 2]", '{"versions": {"torch": "2.13.0"}}', *map(json.dumps, items)]
    return "\n".join(lines)


def test_what_a_container_printed_becomes_results_and_versions() -> None:
    report = Report("img")
    results = list(_inside(Ended(0, printed(*INSIDE), ""), "all", report))
    assert [result.name for result in results] == INSIDE
    assert all(result.ok for result in results)
    assert report.versions == {"torch": "2.13.0"}


def test_the_check_that_a_container_died_in_is_the_one_that_failed() -> None:
    ended = Ended(139, printed("sandbox", "python"), "warning\nFatal Python error\n")
    last = list(_inside(ended, "all", Report("img")))[-1]
    assert (last.name, last.ok) == ("torch", False)
    assert last.detail == "the container was ended by SIGSEGV: Fatal Python error"


@pytest.mark.parametrize(
    ("ended", "told"),
    [
        (Ended(1, "", "ImportError: libcudart"), "ended with code 1: ImportError: libcudart"),
        (Ended(137, "", ""), "was ended by SIGKILL, out of memory?"),
        (Ended(255, "", ""), "was ended by signal 127"),
        (Ended(None, "", ""), "did not end within its time limit"),
        (Ended(None, "", "", error="exec format error"), "did not start: exec format error"),
    ],
)
def test_every_end_is_told(ended: Ended, told: str) -> None:
    assert str(ended) == told


def test_one_line_a_check() -> None:
    assert str(Result("torch", ok=True, detail="2.13.0", seconds=1.26)).split() == [
        "ok", "torch", "2.13.0", "(1.3", "s)",
    ]  # fmt: skip
    assert str(Result("torch", ok=False, detail="no")).startswith("FAIL ")


def test_reports_for_machines() -> None:
    report = Report("img", results=[Result("a", ok=True, detail="x"), Result("b", False, "<no>")])
    assert report.as_dict()["ok"] is False
    assert report.as_dict()["checks"][1] == {
        "name": "b", "ok": False, "detail": "<no>", "seconds": 0.0,
    }  # fmt: skip
    suite = ET.fromstring(report.junit())
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    failure = suite.find("testcase[@name='b']/failure")
    assert failure is not None
    assert failure.get("message") == "<no>"


def test_the_gpu_checks_come_only_where_they_are_asked_for() -> None:
    assert "nccl" not in names(gpus=False)
    assert names(gpus=True)[-2:] == ["gpu", "nccl"]


def test_the_checks_are_python_3_8_and_need_nothing_to_start() -> None:
    tree = ast.parse(Path(checks.__file__).read_text(), feature_version=(3, 8))
    modules = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert modules <= sys.stdlib_module_names | {"importlib.metadata", "importlib.util"}


def test_the_packed_file_holds_the_entrypoint_and_fits_into_the_environment() -> None:
    data = pack()
    assert len(data) < 1_000_000  # Linux takes 2 MiB of arguments and environment
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert sorted(archive.namelist()) == ["__main__.py", "entrypoint.pyz"]


def test_the_packed_file_runs_and_a_crash_of_one_check_is_that_check_s_failure(
    tmp_path: Path,
) -> None:
    file = tmp_path / "smoke.pyz"
    file.write_bytes(pack())
    # A torch that cannot be loaded, as one built for another libc is.
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.12: cannot open')\n")
    command = [sys.executable, str(file), "all"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={"PYTHONPATH": str(tmp_path)}
    )
    results = {item.name: item for item in _inside(Ended(0, done.stdout, ""), "all", Report("x"))}
    assert list(results) == INSIDE
    assert results["torch"].detail == "OSError: libcudart.so.12: cannot open"
    assert results["entrypoint"].ok, results["entrypoint"].detail


@pytest.mark.parametrize(
    ("arch", "major", "minor", "runs"),
    [
        ("sm_90", 9, 0, True),
        ("sm_80", 8, 6, True),
        ("sm_86", 8, 0, False),
        ("sm_80", 9, 0, False),
        ("sm_90a", 9, 0, True),
        ("compute_80", 9, 0, True),
        ("compute_90", 8, 0, False),
        ("sm_120", 12, 0, True),
        ("gfx90a", 9, 0, False),
    ],
)
def test_code_runs_on_its_own_generation_and_compiled_code_on_later_ones(
    arch: str, major: int, minor: int, *, runs: bool
) -> None:
    assert checks.runs_on(arch, major, minor) is runs


def test_versions_of_nvidia_s_builds_are_compared_by_their_numbers() -> None:
    assert checks.numbers("2.6.0a0+ecf3bae40a.nv25.01") == checks.numbers("2.6.0a0+ecf3bae40a")
    assert checks.numbers("2.13.0+cpu") == [2, 13, 0]
    assert checks.numbers("2.13.0") != checks.numbers("2.13.1")


def test_pyg_s_own_warning_about_a_broken_part_is_a_failure() -> None:
    def broken() -> str:
        warnings.warn(
            "An issue occurred while importing 'torch-scatter'. Stacktrace: …", stacklevel=1
        )
        return "2.8.1"

    found = checks.run(broken)
    assert found["ok"] is False
    assert "torch-scatter" in str(found["detail"])
