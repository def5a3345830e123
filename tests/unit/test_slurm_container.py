"""pyxis's flags: mounts, workdir, image, variables. Cases of kinds 1 and 6 by id."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.jobs import decided
from toolkit import mounts as mounting
from toolkit.errors import UsageError
from toolkit.slurm import container

CWD = Path("/home/u/proj")
ENVIRON = {"PWD": str(CWD), "HOME": "/home/u", "SCRATCH": "/scratch/u", "ODD": "/a:b"}


def there(_: str) -> bool:
    return True


def absent(_: str) -> bool:
    return False


def mounts(*items: str, exists: Any = there) -> list[str]:
    return [str(mount) for mount in mounting.parse(items, CWD, ENVIRON, exists)[0]]


class Made(NamedTuple):
    flags: tuple[str, ...]
    notes: tuple[str, ...]


def compose(exists: Any = there, environ: dict[str, str] | None = None, **options: Any) -> Made:
    options = {"container_image": "nvcr.io/nvidia/pyg:24.01-py3", **options}
    where: dict[str, Any] = {"cwd": CWD, "run_dir": Path("/runs/x"), "exists": exists}
    job = decided(ENVIRON if environ is None else environ, **where, **options)
    flags, notes = container.flags(job, ["NOTE", "TOOLKIT_RUN_DIR"], "42")
    return Made(tuple(flags), (*job.notes, *notes))


def flag(flags: tuple[str, ...], name: str) -> str | None:
    found = [word for word in flags if word.partition("=")[0] == f"--{name}"]
    assert len(found) <= 1
    return found[0].partition("=")[2] if found else None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (".", "/home/u/proj:/home/u/proj"),
        ("./input", "/home/u/proj/input:/home/u/proj/input"),
        (".:/workspace", "/home/u/proj:/workspace"),
        ("$PWD:/workspace", "/home/u/proj:/workspace"),
        ("${PWD}/in:/in", "/home/u/proj/in:/in"),
        ("$SCRATCH:$SCRATCH", "/scratch/u:/scratch/u"),
        ("~/data:/data", "/home/u/data:/data"),
        ("~:/home/me", "/home/u:/home/me"),
        ("../other:/other:ro", "/home/u/other:/other:ro"),
        ("input:/input/", "/home/u/proj/input:/input"),
        ("//data//x/:/x/./y", "/data/x:/x/y"),
        ("tmpfs:/scratch", "tmpfs:/scratch"),
    ],
)
def test_case_6_1_paths_become_absolute(given: str, expected: str) -> None:
    assert mounts(given) == [expected]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("/data:/", "container's root"),
        ("/data:/..", "container's root"),
        ("/data:///", "container's root"),
        (".:workspace", "must be an absolute path"),
        ("$NOWHERE:/x", "NOWHERE is not set"),
        ("$ODD:/x", "a colon"),
        ("/a:", "lacks a path"),
        (":/a", "lacks a path"),
        ("", "lacks a path"),
        ("/x:/toolkit-run", "run directory"),
        ("/x:/toolkit-run/logs", "run directory"),
    ],
)
def test_case_6_1_what_cannot_be_a_mount_is_an_error(given: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        mounts(given)


def test_case_6_1_a_missing_source_is_an_error_or_a_note() -> None:
    with pytest.raises(UsageError, match="does not exist"):
        mounts("./input:/input", exists=absent)
    found, notes = mounting.parse(["/lustre/x:/x"], CWD, ENVIRON, absent)
    assert str(found[0]) == "/lustre/x:/x"
    assert any("/lustre/x" in note for note in notes)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("/data/run 1:/data", ["/data/run 1:/data"]),
        ("/data:/data:ro,rprivate", ["/data:/data:ro+rprivate"]),
        ("/data:/data:ro+rprivate", ["/data:/data:ro+rprivate"]),
        ("/data:/data:x-create=dir,ro", ["/data:/data:x-create=dir+ro"]),
        ("/a:/a,/b:/b:ro", ["/a:/a", "/b:/b:ro"]),
        ("/a:/a:ro,rprivate,./b:/b", ["/a:/a:ro+rprivate", "/home/u/proj/b:/b"]),
    ],
)
def test_case_6_2_separators(given: str, expected: list[str]) -> None:
    assert mounts(given) == expected


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("/data/a,b:/data", "comma"),
        ("/data:/a,b", "comma"),
        ("/a,/b:/c,d:ro", "comma"),
        ("/data/t:10/x:/x", "colon"),
        ("/a:/b:/c", "colon"),
        ("/a:/b:ro:/c", "colon"),
        ("/a\nb:/c", "line break"),
    ],
)
def test_case_6_2_what_pyxis_cannot_carry_is_an_error(given: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        mounts(given)


def test_case_6_2_white_space_is_kept_and_noted() -> None:
    made = compose(container_mounts=("/data/run 1:/data", "/b:/b"))
    assert flag(made.flags, "container-mounts") == "/data/run 1:/data,/b:/b,/runs/x:/toolkit-run"
    assert any("0.24" in note for note in made.notes)


@pytest.mark.parametrize("second", ["/b:/x", "/b:/x/", "/a:/x", "/b:/x:ro"])
def test_a_target_is_given_once(second: str) -> None:
    with pytest.raises(UsageError, match="/x"):
        mounts("/a:/x", second)


NAME = st.text(st.characters(exclude_characters="\0/:,\n$", exclude_categories=["Cs"]), min_size=1)


@given(source=NAME, target=NAME)
def test_a_path_without_separators_arrives_as_it_is(source: str, target: str) -> None:
    if {source, target} & {".", ".."}:
        return
    assert mounts(f"/d/{source}:/t/{target}") == [f"/d/{source}:/t/{target}"]


@given(text=st.text("/abc.:,+ $~\n", min_size=1))
def test_whatever_is_taken_is_one_mount_to_pyxis(text: str) -> None:
    try:
        found = mounts(text)
    except UsageError:
        return
    for mount in found:
        source, target, *flags = mount.split(":")
        assert source.startswith("/")
        assert target.startswith("/")
        assert len(flags) <= 1
        assert not set(",\n") & set(mount)


@pytest.mark.parametrize("place", ["/workspace/run/log.txt", "/opt/out", "/tmp/out"])
@pytest.mark.parametrize(
    "words",
    [
        ["--output={}"], ["--output", "{}"], ["--output-dir={}"], ["--out={}"], ["-o", "{}"],
        ["--save-dir={}"], ["--save_path", "{}"], ["--checkpoint-dir={}"], ["--log-dir", "{}"],
        ["--logdir={}"], ["--results={}"], ["--ckpt={}"], ["hydra.run.dir={}"], ["output_dir={}"],
        ["--trainer.save_dir={}"], ["--run-dir", "{}"],
    ],
)  # fmt: skip
def test_case_6_4_an_output_inside_the_image_is_said_before(words: list[str], place: str) -> None:
    command = ("python", "train.py", *(word.format(place) for word in words))
    options: dict[str, Any] = {"command": command, "container_mounts": ("/data:/data",)}
    (note,) = [note for note in compose(**options).notes if place in note]
    assert "--mount" in note
    assert "--container-writable" in note
    assert not [n for n in compose(**options, container_writable=True).notes if place in n]


@pytest.mark.parametrize(
    "words",
    [
        ("--output=/data/run/log.txt",),
        ("--output", "/data"),
        ("--output=/dev/null",),
        ("--output=relative",),
        ("--data=/opt/data",),
        ("--log-level=debug",),
        ("--logo=x",),
        ("--resume-from-checkpoint=/opt/model.pt",),
        ("--load_checkpoint", "/opt/model.pt"),
        ("/opt/output",),
        ("--output=/toolkit-run/x",),
        ("--output",),
    ],
)
def test_case_6_4_other_options_are_left_alone(words: tuple[str, ...]) -> None:
    command = ("python", "train.py", *words)
    made = compose(command=command, container_mounts=("/data:/data",))
    assert not [note for note in made.notes if "inside the image" in note]


def test_case_6_4_a_mounted_home_can_be_written_to() -> None:
    command = ("python", "train.py", "--output=/home/u/out")
    assert any("/home/u/out" in note for note in compose(command=command).notes)
    made = compose(command=command, container_mount_home=True)
    assert not [note for note in made.notes if "/home/u/out" in note]


@pytest.mark.parametrize(
    ("given", "workdir"),
    [
        ((".:/workspace",), "/workspace"),
        ((), "/workspace"),
        (("/home/u:/home/u",), "/home/u/proj"),
        (("/home/u:/h", ".:/code"), "/code"),
        (("/:/host",), "/host/home/u/proj"),
        (("/home/u/pro:/x",), None),
        (("/data:/data",), None),
    ],
)
def test_case_6_5_the_command_starts_where_the_current_directory_is(
    given: tuple[str, ...], workdir: str | None
) -> None:
    made = compose(container_mounts=given)
    assert flag(made.flags, "container-workdir") == workdir
    assert any("not mounted" in note for note in made.notes) == (workdir is None)


def test_case_6_5_a_workdir_of_ones_own() -> None:
    made = compose(container_workdir="/workspace/sub")
    assert flag(made.flags, "container-workdir") == "/workspace/sub"
    assert not made.notes
    assert any("/opt/app" in note for note in compose(container_workdir="/opt/app").notes)
    with pytest.raises(UsageError, match="absolute"):
        compose(container_workdir="sub")


def test_case_1_5_the_image_is_spelled_for_enroot() -> None:
    made = compose(container_image="registry.example.com:5443/team/img:1")
    assert "--container-image=registry.example.com:5443#team/img:1" in made.flags


def test_a_squashfs_file_is_absolute_and_may_be_elsewhere() -> None:
    made = compose(container_image="img.sqsh", exists=lambda path: not path.endswith("sqsh"))
    assert "--container-image=/home/u/proj/img.sqsh" in made.flags
    assert any("img.sqsh" in note for note in made.notes)


def test_home_and_root_are_as_asked() -> None:
    assert "--no-container-mount-home" in compose().flags
    assert "--container-writable" not in compose().flags
    made = compose(container_mount_home=True, container_writable=True)
    assert "--container-mount-home" in made.flags
    assert "--no-container-mount-home" not in made.flags
    assert "--container-writable" in made.flags


def test_a_container_is_named_only_when_asked_and_for_this_job() -> None:
    assert flag(compose().flags, "container-name") is None
    made = compose(container_name="pyg")
    assert flag(made.flags, "container-name") == "pyg-42"
    assert any("after the job" in note for note in made.notes)
    assert flag(compose(container_name="pyg:no_exec").flags, "container-name") == "pyg-42:no_exec"


@pytest.mark.parametrize("path", ["/home/u/a,b", "/home/u/2026-01-01T10:00"])
def test_a_path_that_cannot_be_mounted_names_the_way_out(path: str) -> None:
    with pytest.raises(UsageError, match="--runs"):
        mounting.passable(path, "the run directory")
    with pytest.raises(UsageError, match="--runs"):
        decided(container_image="ubuntu", cwd=Path(path))
