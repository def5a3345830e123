"""``image.lock``: what a push wrote is what a run starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli import toolkit
from toolkit.errors import UsageError
from toolkit.image.pin import FILE_NAME, Pin, pinned, read, write
from toolkit.image.reference import parse

DIGEST = "sha256:" + "0123456789abcdef" * 4
BUILD = "0123456789abcdef"
LOCK = Pin(
    "registry.example.com:5005/team/pyg:1", DIGEST, "linux/amd64", {"torch": "2.13.0"}, BUILD
)
LOCKED = f"registry.example.com:5005/team/pyg@{DIGEST}"


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write(LOCK, tmp_path)
    assert read(tmp_path) == LOCK


@pytest.mark.parametrize(
    ("image", "found"),
    [
        ("registry.example.com:5005/team/pyg:1", LOCKED),
        ("registry.example.com:5005#team/pyg:1", LOCKED),
        ("docker://registry.example.com:5005#team/pyg:1", LOCKED),
        ("registry.example.com:5005/team/pyg:2", None),
        ("registry.example.com:5005/team/pyg", None),
        (f"registry.example.com:5005/team/pyg@{DIGEST.replace('0', '1')}", None),
        ("./pyg.sqsh", None),
    ],
)
def test_only_the_image_that_was_pushed_is_pinned(
    tmp_path: Path, image: str, found: str | None
) -> None:
    named = parse(image)
    assert pinned(named, tmp_path) == (named, ""), "without a lock nothing is pinned"
    write(LOCK, tmp_path)
    decided, build = pinned(named, tmp_path)
    if found is None:
        assert (decided, build) == (named, "")
    else:
        assert (decided.docker(), build) == (found, BUILD)


def test_a_run_starts_the_pushed_image_by_its_digest(tmp_path: Path) -> None:
    write(LOCK, tmp_path)
    words = ("run", "--dry-run", "--on", "slurm", "--image", LOCK.reference, "--", "true")
    ran = toolkit(tmp_path, *words)
    assert ran.returncode == 0, ran.stderr
    assert f"--container-image=registry.example.com:5005#team/pyg:{DIGEST}" in ran.stdout
    assert FILE_NAME in ran.stderr
    assert f"TOOLKIT_EXPECTED_BUILD={BUILD}" in ran.stdout


def test_a_lock_without_a_build_asks_for_none(tmp_path: Path) -> None:
    write(replace(LOCK, build=""), tmp_path)
    assert "build" not in (tmp_path / FILE_NAME).read_text()
    words = ("run", "--dry-run", "--on", "slurm", "--image", LOCK.reference, "--", "true")
    ran = toolkit(tmp_path, *words)
    assert ran.returncode == 0, ran.stderr
    assert "TOOLKIT_EXPECTED_BUILD" not in ran.stdout


def test_a_damaged_lock_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text("reference = 3\n[")
    with pytest.raises(UsageError, match=FILE_NAME):
        pinned(parse("ubuntu"), tmp_path)
