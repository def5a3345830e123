"""Importing images, as far as it goes without enroot: lock, folder, space, what a job uses."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.registry import serve
from toolkit import decide
from toolkit.common.lock import Lock
from toolkit.config import Setting
from toolkit.enroot import importing
from toolkit.enroot.images import SQUASH_OPTIONS, Images, judge_squashfs, squashfs_problem
from toolkit.enroot.importing import Need, check_space, explain, needs
from toolkit.enroot.registry import OCI_MANIFEST, Image
from toolkit.enroot.site import Site
from toolkit.errors import CredentialsError, ImportImageError, UsageError
from toolkit.image.reference import parse

if TYPE_CHECKING:
    from collections.abc import Iterator

DIGEST = "sha256:" + "a" * 64
SITE = Site(None, (), {"ENROOT_CACHE_PATH": "/cache", "ENROOT_TEMP_PATH": "/temp"})
IMAGE = Image(DIGEST, None, "v2s2", "sha256:c", {"sha256:l1": 10**9, "sha256:l2": 10**8})


def superblock(used: int, compression: int = 6, magic: bytes = b"hsqs") -> bytes:
    return struct.pack("<4s16xH6xHH8xQ", magic, compression, 4, 0, used)


def put(folder: Images, digest: str = DIGEST, *, size: int = 4096, **record: Any) -> Path:
    folder.path.mkdir(exist_ok=True)
    path = folder.file(digest)
    path.write_bytes(superblock(size).ljust(size, b"\0"))
    folder.write_record({"digest": digest, "size": size, "index": None, **record})
    return path


@pytest.mark.parametrize(
    ("head", "size", "word"),
    [
        (b"", 0, "too few"),
        (superblock(4096, magic=b"ELF!"), 4096, "no squashfs"),
        (superblock(4096, compression=99), 4096, "unknown"),
        (superblock(4096), 4095, "cut short"),
    ],
)
def test_a_file_that_is_not_whole_is_not_used(head: bytes, size: int, word: str) -> None:
    problem = judge_squashfs(head, size)
    assert problem is not None
    assert word in problem


def test_a_real_squashfs_file_is_whole_until_it_is_cut(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "file").write_bytes(os.urandom(200_000))
    made = tmp_path / "made.sqsh"
    try:
        subprocess.run(
            ["mksquashfs", tmp_path / "root", made, *SQUASH_OPTIONS.split(), "-quiet"],
            check=True,
            capture_output=True,
        )
    except FileNotFoundError:
        pytest.skip("mksquashfs is not installed")
    assert squashfs_problem(made) is None
    os.truncate(made, made.stat().st_size // 2)
    assert "cut short" in str(squashfs_problem(made))


# ---- the lock

CRITICAL = """
import sys, time
from pathlib import Path
from toolkit.common.lock import Lock
folder = Path(sys.argv[1])
with Lock(folder / "lock", timeout_s=60, poll_s=0.01):
    (folder / "inside").touch(exist_ok=False)
    time.sleep(0.02)
    (folder / "inside").unlink()
    (folder / f"done{time.monotonic_ns()}").touch()
"""


def test_case_6_7_sixteen_at_once_go_in_one_after_another(tmp_path: Path) -> None:
    started = [subprocess.Popen([sys.executable, "-c", CRITICAL, str(tmp_path)]) for _ in range(16)]
    assert [process.wait() for process in started] == [0] * 16
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 16
    assert all(name.startswith("done") for name in names)


def test_case_6_7_a_timeout_is_an_error_that_names_the_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with Lock(path, timeout_s=1):
        heard: list[str] = []
        with (
            pytest.raises(ImportImageError, match=f"process {os.getpid()}") as refused,
            Lock(path, timeout_s=0.1, poll_s=0.02, say=heard.append),
        ):
            pytest.fail("went in without the lock")
        assert str(path) in str(refused.value)
        assert len(heard) == 1
        assert path.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_holder_on_this_machine_is_stale_at_once(tmp_path: Path) -> None:
    script = CRITICAL.replace("time.sleep(0.02)", "print('in', flush=True); time.sleep(60)")
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        holder.kill()
        holder.wait()
    heard: list[str] = []
    with Lock(tmp_path / "lock", timeout_s=5, poll_s=0.02, say=heard.append) as lock:
        assert lock.held
    assert "stale" in heard[0]
    assert [path.name for path in tmp_path.iterdir()] == ["inside"]


def test_a_holder_elsewhere_is_stale_when_it_was_not_touched_for_long(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text(json.dumps({"host": "node99", "pid": 1, "start": "1", "token": "other"}))
    with (
        pytest.raises(ImportImageError, match="process 1 on node99"),
        Lock(path, timeout_s=0.1, poll_s=0.02),
    ):
        pytest.fail("went in without the lock")
    os.utime(path, (time.time() - 121,) * 2)
    with Lock(path, timeout_s=0.1, poll_s=0.02) as lock:
        assert lock.held


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_damaged_lock_does_not_last(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lock"
    path.write_text(text)
    os.utime(path, (time.time() - 121,) * 2)
    with Lock(path, timeout_s=1, poll_s=0.02) as lock:
        assert lock.held


def test_a_holder_that_works_for_long_keeps_its_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with Lock(path, timeout_s=1, beat_s=0.05):
        # As if it were another machine's: only the touches speak for it.
        path.write_text(json.dumps({**json.loads(path.read_text()), "host": "node99"}))
        with (
            pytest.raises(ImportImageError),
            Lock(path, timeout_s=1, poll_s=0.05, stale_s=0.5),
        ):
            pytest.fail("took the lock away from a holder that is alive")


def test_waiting_ends_when_the_lock_is_no_longer_needed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    done = threading.Event()
    threading.Timer(0.2, done.set).start()
    with (
        Lock(path, timeout_s=1),
        Lock(path, timeout_s=10, poll_s=0.02, needless=done.is_set) as other,
    ):
        assert not other.held
        assert path.exists()


# ---- the folder


def test_an_image_is_found_by_its_digest_and_by_that_of_its_list(tmp_path: Path) -> None:
    images = Images(tmp_path / "images")
    index = "sha256:" + "b" * 64
    assert images.find(DIGEST) is None
    path = put(images, index=index)
    for digest in (DIGEST, index):
        found = images.find(digest)
        assert found is not None
        assert (found.path, found.digest) == (path, DIGEST)


@pytest.mark.parametrize("harm", ["cut", "other", "no_record", "no_file", "record_cut"])
def test_what_is_not_whole_is_not_found(tmp_path: Path, harm: str) -> None:
    images = Images(tmp_path / "images")
    path = put(images)
    if harm == "cut":
        os.truncate(path, 4000)
    elif harm == "other":
        path.write_bytes(b"x" * 4096)
    elif harm == "no_record":
        images.record(DIGEST).unlink()
    elif harm == "no_file":
        path.unlink()
    else:
        os.truncate(images.record(DIGEST), 10)
    assert images.find(DIGEST) is None


def test_clean_goes_by_the_last_use(tmp_path: Path) -> None:
    images = Images(tmp_path / "images")
    old, used = put(images), put(images, "sha256:" + "b" * 64)
    leftover = images.path / ".sha256-x.sqsh.abc.part"
    leftover.touch()
    fresh = images.path / ".sha256-y.sqsh.abc.part"
    fresh.touch()
    past = (time.time() - 40 * 86400,) * 2
    for path in [*images.path.glob("sha256-*"), leftover]:
        os.utime(path, past)
    found = images.find("sha256:" + "b" * 64)
    assert found is not None
    images.used(found)
    assert {path for path, _ in images.unused(30 * 86400)} == {old, leftover}
    command = [sys.executable, "-c", "from toolkit.cli import main; main()", "import", "--clean"]
    for extra, left in ((["--dry-run"], True), ([], False)):
        subprocess.run([*command, *extra], cwd=tmp_path, check=True, capture_output=True)
        assert old.exists() == left
    assert sorted(path.name for path in images.path.iterdir()) == sorted(
        [used.name, used.with_suffix(".json").name, fresh.name]
    )


# ---- space


def test_space_is_that_of_the_file_the_cache_and_the_unpacked_image() -> None:
    assert [need.folder for need in needs(IMAGE, Path("/images"), SITE, elsewhere=False)] == [
        Path("/images"),
        Path("/cache"),
        Path("/temp"),
    ]
    assert len(needs(IMAGE, Path("/images"), SITE, elsewhere=True)) == 1


def test_layers_that_enroot_has_are_not_counted(tmp_path: Path) -> None:
    (tmp_path / "l1").touch()
    site = Site(None, (), {"ENROOT_CACHE_PATH": str(tmp_path), "ENROOT_TEMP_PATH": "/temp"})
    cache = needs(IMAGE, Path("/images"), site, elsewhere=False)[1]
    assert 10**8 <= cache.size < 2 * 10**8


@pytest.mark.parametrize(("free", "fits"), [((30, 5), True), ((29, 5), False), ((30, 4), False)])
def test_needs_on_one_file_system_add_up(tmp_path: Path, free: tuple[int, int], fits: bool) -> None:
    for name in ("0", "1"):
        (tmp_path / name).mkdir()
    sizes = (("0", 10), ("0/not/there/yet", 20), ("1", 5))
    wanted = [Need(tmp_path / name, "x", size) for name, size in sizes]
    try:
        check_space(wanted, lambda path: free[int(path.name)], lambda path: int(path.name))
    except ImportImageError:
        assert not fits
    else:
        assert fits


def test_too_little_space_says_how_much_and_where(tmp_path: Path) -> None:
    wanted = [Need(tmp_path, "the image", 3 * 10**9), Need(tmp_path / "x", "unpacking", 10**9)]
    with pytest.raises(ImportImageError, match=r"4\.0 GB are needed and 2\.0 GB are free") as told:
        check_space(wanted, lambda _: 2 * 10**9, lambda _: 7)
    assert "ENROOT_TEMP_PATH" in str(told.value)
    check_space(wanted, lambda _: 4 * 10**9, lambda _: 7)


# ---- what enroot says


@pytest.mark.parametrize(
    ("said", "kind", "words"),
    [
        (
            "[ERROR] URL https://x returned error code: 401 Unauthorized",
            CredentialsError,
            "--check",
        ),
        (
            "[ERROR] URL https://x returned error code: 404 Not Found",
            ImportImageError,
            "OCI format",
        ),
        ("mksquashfs: No space left on device", ImportImageError, "ENROOT_TEMP_PATH"),
        ("enroot-nsenter: failed: Operation not permitted", ImportImageError, "namespaces"),
        ("", ImportImageError, "printed nothing"),
    ],
)
def test_what_enroot_says_is_explained(said: str, kind: type[Exception], words: str) -> None:
    image = Image(DIGEST, None, OCI_MANIFEST, "sha256:c", {})
    error = explain(parse("reg.example.com/team/img:1"), image, said, srun=False)
    assert type(error) is kind
    assert words in str(error)


@pytest.mark.parametrize("image", ["./pyg.sqsh", "dockerd://img:1"])
def test_only_images_in_a_registry_are_imported(image: str) -> None:
    with pytest.raises(UsageError, match="in a registry"):
        importing.look_up(parse(image), SITE)


# ---- what a job uses


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("ENROOT_ALLOW_HTTP", "yes")
    monkeypatch.setenv("ENROOT_CONFIG_PATH", str(tmp_path))
    with serve() as server:
        yield server


def image_of(cwd: Path, name: str, heard: list[str], *, dry_run: bool = False, **more: Any) -> str:
    """The image of a job on Slurm, as ``run.json`` names it."""
    given = {"container_image": name, "on": "slurm", **more}
    settings = {key: Setting(value, f"--{key}") for key, value in given.items()}
    job = decide.decide(
        settings, ["true"], explicit_command=True, cwd=cwd, dry_run=dry_run, say=heard.append
    )
    return str(job.record["job"]["container_image"])


def test_a_job_uses_the_imported_file_by_digest_and_says_so(tmp_path: Path) -> None:
    name = f"reg.example.com/team/img@{DIGEST}"
    heard: list[str] = []
    assert image_of(tmp_path, name, heard) == name
    assert heard == []
    path = put(Images(tmp_path / "images"))
    assert image_of(tmp_path, name, heard) == str(path)
    assert str(path) in heard[0]
    assert image_of(tmp_path, name, heard, dry_run=True) == str(path)


def test_a_tag_that_moved_is_not_the_imported_file(tmp_path: Path, registry: Any) -> None:
    folder = Images(tmp_path / "elsewhere")
    where: dict[str, Any] = {"images": str(folder.path)}
    digest = registry.image("1", {"a": b"old"})
    name = f"{registry.host}/team/img:1"
    heard: list[str] = []
    assert image_of(tmp_path, name, heard, **where) == name
    assert registry.asked == []  # nothing of this repository was ever imported
    path = put(folder, digest, repository=f"{registry.host}/team/img")
    assert image_of(tmp_path, name, heard, **where) == str(path)
    registry.image("1", {"a": b"new"})
    assert image_of(tmp_path, name, heard, **where) == name
    assert "another image by now" in heard[-1]
    del registry.manifests["1"]
    assert image_of(tmp_path, name, heard, **where) == name
    assert "not used" in heard[-1]


@pytest.mark.parametrize("image", ["./a.sqsh", "dockerd://img:1", "reg.example.com/img:1"])
@pytest.mark.parametrize("dry_run", [True, False])
def test_other_images_stay_as_they_are(tmp_path: Path, image: str, dry_run: bool) -> None:
    (tmp_path / "a.sqsh").touch()
    heard: list[str] = []
    expected = {"./a.sqsh": str(tmp_path / "a.sqsh"), "dockerd://img:1": "img:1"}.get(image, image)
    assert image_of(tmp_path, image, heard, dry_run=dry_run) == expected
    assert heard == []
