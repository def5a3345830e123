from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.unit.workload_ranks import ROOT
from workloads.common.errors import WorkloadError
from workloads.common.graph import ARRAYS, finish_graph, open_graph, save_array, write_edges
from workloads.common.prepare import Recipe, default_root, prepare, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ELSEWHERE = json.dumps(
    {"host": "othernode", "boot": "b", "space": "pid:[1]", "pid": 1, "start": "1"}
)

# A process that prepares ROOT/data: tells when it builds, takes SECONDS over it, writes two files.
WRITER = """
import os, sys, time
from pathlib import Path
from workloads.common.prepare import Recipe, prepare

root, seconds, stale = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])

def build(folder):
    with (root.parent / "builds").open("a") as log:
        log.write(f"{os.getpid()}\\n")
    (folder / "first").write_text("half")
    print("building", flush=True)
    time.sleep(seconds)
    (folder / "second").write_text("whole")

folder = prepare(root, Recipe("data", build), timeout=60, stale=stale)
assert sorted(os.listdir(folder)) == ["first", "second"], os.listdir(folder)
"""


@contextlib.contextmanager
def writer(root: Path, seconds: float, stale: float = 30) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(root), str(seconds), str(stale)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def until_building(process: subprocess.Popen[str]) -> None:
    assert process.stdout
    assert process.stdout.readline() == "building\n"


def fill(folder: Path) -> None:
    (folder / "second").write_text("whole")


def test_of_many_processes_one_writes_and_all_get_the_whole(tmp_path: Path) -> None:
    roots = [tmp_path / "shared" / "data", tmp_path / "local" / "data"]
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(writer(root, 0.5)) for root in roots for _ in range(5)]
        for process in processes:
            assert process.wait(60) == 0
    for root in roots:
        assert len((root.parent / "builds").read_text().split()) == 1
        assert [path.name for path in root.iterdir()] == ["data"]


def test_a_killed_writer_is_replaced_at_once_on_its_own_machine(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with writer(root, 60) as process:
        until_building(process)
        process.kill()
        process.wait()
    assert len(list(root.iterdir())) == 2  # its lock and its half
    started = time.monotonic()
    prepare(root, Recipe("data", fill), timeout=20)
    assert time.monotonic() - started < 10  # far less than the 30 s after which a lock is stale
    assert [path.name for path in root.iterdir()] == ["data"]
    assert [path.name for path in (root / "data").iterdir()] == ["second"]


def test_a_lock_from_elsewhere_is_passed_over_by_one_when_nobody_touches_it(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / ".data.lock.0").write_text(ELSEWHERE)
    (root / ".data.tmp-0123").mkdir()
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(writer(root, 0.5, stale=1)) for _ in range(4)]
        for process in processes:
            assert process.wait(60) == 0
    assert len((tmp_path / "builds").read_text().split()) == 1
    assert [path.name for path in root.iterdir()] == ["data"]


def test_a_writer_that_takes_long_keeps_its_lock(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with writer(root, 4, stale=1) as first:
        until_building(first)
        # To a process on another machine this one's number says nothing: only the touches count.
        lock = root / ".data.lock.0"
        lock.write_text(ELSEWHERE)
        prepare(root, Recipe("data", fill), timeout=30, stale=1)
        assert first.wait(30) == 0
    assert sorted(path.name for path in (root / "data").iterdir()) == ["first", "second"]


ELSEWHERE = json.dumps(
    {"host": "othernode", "boot": "b", "space": "pid:[1]", "pid": 1, "start": "1"}
)

# A process that prepares ROOT/data in twenty pieces, and tells each one that it makes.
PIECES = """
import os, sys, time
from functools import partial
from pathlib import Path
from workloads.common.prepare import Recipe, prepare, wait_for

root, role = Path(sys.argv[1]), sys.argv[2]
log = root.parent / "made"

def build(folder):
    (root.parent / "builds").open("a").write("x")
    (folder / "all").write_bytes(bytes(20))

def piece(folder, number):
    with (folder / "all").open("r+b") as file:
        file.seek(number)
        time.sleep(0.05)
        file.write(bytes([number]))
    with log.open("a") as made:
        made.write(f"{number} {os.getpid()}\\n")

def pieces(folder):
    return {f"p{number}": partial(piece, folder, number) for number in range(20)}

def finish(folder):
    (folder / "finished").touch()

print("started", flush=True)
do = {"prepare": prepare, "wait": wait_for}[role]
do(root, Recipe("data", build, pieces, finish), timeout=60, stale=3)
"""


def crew(root: Path, role: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PIECES, str(root), role],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def assert_whole(root: Path) -> list[list[str]]:
    """The folder is whole and nothing else is left; which pieces were made, by whom."""
    assert [path.name for path in root.iterdir()] == ["data"]
    assert sorted(path.name for path in (root / "data").iterdir()) == ["all", "finished"]
    assert (root / "data/all").read_bytes() == bytes(range(20))
    return [line.split() for line in (root.parent / "made").read_text().splitlines()]


def test_those_who_wait_make_pieces_too_and_none_is_made_twice(tmp_path: Path) -> None:
    root = tmp_path / "root"
    processes = [crew(root, role) for role in ("prepare", "prepare", "wait", "wait")]
    said = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, said
    made = assert_whole(root)
    assert sorted(int(number) for number, _ in made) == list(range(20))
    assert len({pid for _, pid in made}) >= 3
    # A second run finds it and does nothing.
    before = (root / "data/all").stat()
    again = crew(root, "prepare")
    assert again.wait(60) == 0
    again.communicate()
    assert (root / "data/all").stat().st_mtime_ns == before.st_mtime_ns
    assert (tmp_path / "builds").read_text() == "x"
    assert len(assert_whole(root)) == 20


@pytest.mark.parametrize("seed", range(3))
def test_killed_at_any_moment_the_next_goes_on_where_they_stopped(
    tmp_path: Path, seed: int
) -> None:
    root, chance = tmp_path / "root", random.Random(seed)
    for _ in range(4):
        processes = [crew(root, role) for role in ("prepare", "wait")]
        for process in processes:
            assert process.stdout
            process.stdout.readline()
        time.sleep(chance.uniform(0, 0.4))
        for process in processes:
            process.kill()
            process.communicate()
    last = crew(root, "prepare")
    _, err = last.communicate(timeout=60)
    assert last.returncode == 0, err
    made = assert_whole(root)
    kills = 4 * 2
    assert 20 <= len(made) <= 20 + kills  # only what a killed one was at was made again
    if len({pid for _, pid in made}) > 1:
        assert "goes on where it stopped" in err or str(last.pid) not in {p for _, p in made}


def test_a_piece_that_fails_is_told_and_what_is_made_stays(tmp_path: Path) -> None:
    made: list[str] = []

    def pieces(_: Path) -> dict[str, Callable[[], None]]:
        def full() -> None:
            if len(made) < 2:
                made.append("full")
                raise OSError(28, "No space left on device")

        return {"a": lambda: made.append("a"), "b": full}

    def build(_: Path) -> None:
        made.append("build")

    recipe = Recipe("data", build, pieces, lambda folder: (folder / "whole").touch())
    made.clear()
    with pytest.raises(WorkloadError, match=r"root/data: .*No space left on device.*--data-dir"):
        prepare(tmp_path / "root", Recipe("data", lambda _: None, pieces), timeout=5)
    assert made == ["a", "full"]
    assert prepare(tmp_path / "root", recipe, timeout=5) == tmp_path / "root/data"
    assert made == ["a", "full"]  # neither the piece nor what came before was done again
    assert [path.name for path in (tmp_path / "root/data").iterdir()] == ["whole"]


def test_a_failing_writer_leaves_nothing_and_the_next_one_succeeds(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise OSError(28, "No space left on device")

    root = tmp_path / "root"
    with pytest.raises(WorkloadError, match=r"root/data: .*No space left on device.*--data-dir"):
        prepare(root, Recipe("data", fail), timeout=5)
    assert list(root.iterdir()) == []
    assert prepare(root, Recipe("data", fill), timeout=5) == root / "data"


def test_a_terminated_writer_leaves_nothing(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with writer(root, 60) as process:
        until_building(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM
    assert list(root.iterdir()) == []


def test_a_reader_waits_for_the_whole_and_not_for_ever(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with pytest.raises(WorkloadError, match=r"not prepared within 0.3 s .*held by nobody"):
        wait_for(root, Recipe("data", fill), timeout=0.3)
    with writer(root, 1) as process:
        until_building(process)
        with pytest.raises(WorkloadError, match=rf"held by .* {process.pid} .*--data-timeout"):
            wait_for(root, Recipe("data", fill), timeout=0.3)
        folder = wait_for(root, Recipe("data", fill), timeout=30)
        assert sorted(path.name for path in folder.iterdir()) == ["first", "second"]
        assert process.wait(20) == 0


def test_a_wait_ends_with_what_the_check_raises(tmp_path: Path) -> None:
    stop = threading.Event()

    def check() -> None:
        if stop.is_set():
            raise WorkloadError("another node failed")

    threading.Timer(0.5, stop.set).start()
    with pytest.raises(WorkloadError, match="another node failed"):
        wait_for(tmp_path, Recipe("data", fill), timeout=60, check=check)


@pytest.mark.parametrize("below", ["file", "file/deeper"])
def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WorkloadError, match=r"cannot prepare .*file.*--data-dir"):
        prepare(tmp_path / below, Recipe("data", fill), timeout=5)


def test_where_data_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    home, temporary = tmp_path / "home", tmp_path / f"toolkit-{os.getuid()}"
    home.mkdir()
    assert default_root({"TOOLKIT_DATA": "/data", "HOME": str(home)}) == Path("/data")
    assert default_root({"HOME": str(home)}) == home / ".cache/toolkit"
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(home)}
    assert default_root(cache) == tmp_path / "cache/toolkit"
    assert default_root({"TOOLKIT_DATA": "", "XDG_CACHE_HOME": "", "HOME": str(home)}) == (
        home / ".cache/toolkit"
    )
    # No home, one that is a file, and one under /proc, where nobody may write.
    (tmp_path / "file").touch()
    for environ in ({}, {"HOME": str(tmp_path / "file")}, {"HOME": "/proc/1/task"}):
        assert default_root(environ) == temporary
    temporary.mkdir()
    assert default_root({"HOME": str(tmp_path / "file")}) == temporary
    os.chown(temporary, 12345, -1) if os.getuid() == 0 else pytest.skip("needs root to chown")
    with pytest.raises(WorkloadError, match=r"belongs to another user.*--data-dir"):
        default_root({"HOME": str(tmp_path / "file")})


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    folder = tmp_path / "graph"
    folder.mkdir()
    write_edges(folder, 3, lambda: [(np.array([0, 1, 2]), np.array([1, 2, 0]))])
    save_array(folder, "x", np.eye(3, dtype=np.float32))
    save_array(folder, "y", np.array([0, 1, 0], dtype=np.uint8))
    for name in ("train", "val", "test"):
        save_array(folder, name, np.array([0], dtype=np.int32))
    finish_graph(folder, 2)
    return folder


def test_a_graph_is_mapped_and_not_copied(graph: Path) -> None:
    opened = open_graph(graph)
    assert (opened.num_nodes, opened.num_edges) == (3, 3)
    assert (opened.num_features, opened.num_classes) == (3, 2)
    for name in ARRAYS:
        assert isinstance(getattr(opened, name), np.memmap)
        assert not isinstance(getattr(open_graph(graph, private=True), name), np.memmap)


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("damage", ["cut", "empty", "missing", "garbage", "other", "pickle"])
def test_a_damaged_array_is_told_with_its_folder(graph: Path, name: str, damage: str) -> None:
    file = graph / f"{name}.npy"
    content = file.read_bytes()
    if damage == "cut":
        file.write_bytes(content[:-1])
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage == "missing":
        file.unlink()
    elif damage == "garbage":
        file.write_bytes(os.urandom(len(content)))
    elif damage == "other":
        np.save(file, np.zeros(7))
    else:
        np.save(file, np.array([{}]), allow_pickle=True)
    with pytest.raises(WorkloadError, match=rf"{graph} is damaged .*remove that folder") as caught:
        open_graph(graph)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"arrays": {}, "num_classes": 2}', "\0"])
def test_a_damaged_description_is_told_with_its_folder(graph: Path, text: str) -> None:
    (graph / "graph.json").write_text(text)
    with pytest.raises(WorkloadError, match=f"{graph} is damaged"):
        open_graph(graph)


def test_edges_that_point_beyond_the_array_are_damage(graph: Path) -> None:
    save_array(graph, "indptr", np.array([0, 1, 2, 4]))
    with pytest.raises(WorkloadError, match=r"indptr\.npy ends at 4"):
        open_graph(graph)
