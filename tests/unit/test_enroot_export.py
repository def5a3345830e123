"""``toolkit export``: an engine's tar becomes what enroot starts."""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import tarfile
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.registry import tar
from toolkit.enroot.export import _Stream, files, rewrite

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = {
    "Env": ["A=b c", "PATH=/opt/bin:/bin"],
    "WorkingDir": "/work dir/x",
    "Entrypoint": ["/entry", "it's"],
    "Cmd": ["default", "two words"],
    "Volumes": {"/data": {}},
    "Labels": {"org.pyg.version": "2.8\nx"},
}


def rewritten(source: bytes, config: dict[str, Any]) -> dict[str, tarfile.TarInfo]:
    out = io.BytesIO()
    rewrite(io.BytesIO(source), out, config)
    out.seek(0)
    with tarfile.open(fileobj=out) as archive:
        members = archive.getmembers()
        assert len({member.name for member in members}) == len(members)
        return {member.name: member for member in members}


def test_what_the_engine_left_goes_and_enroots_files_come() -> None:
    source = tar(
        {".dockerenv": b"", "dev/console": b"", "device": b"x", "etc/fstab": b"old", "bin/a": b"a"}
    )
    found = rewritten(gzip.decompress(source), CONFIG)
    assert set(found) == {
        "device", "bin/a", "etc", "work dir", "work dir/x",
        "etc/environment", "etc/fstab", "etc/rc", "etc/rc.local",
    }  # fmt: skip
    assert found["bin/a"].mode == 0o755


def test_the_environment_and_volumes_are_as_enroot_reads_them() -> None:
    made = files(CONFIG)
    assert made["etc/environment"] == "A=b c\nPATH=/opt/bin:/bin\n"
    assert made["etc/fstab"].startswith("${ENROOT_ROOTFS}/data /data none ")
    assert "# org.pyg.version 2.8 x\n" in made["etc/rc"]


@pytest.mark.parametrize(
    ("config", "arguments", "printed"),
    [
        ({"Entrypoint": ["printf", "<%s>"], "Cmd": ["a b"]}, [], "<a b>"),
        ({"Entrypoint": ["printf", "<%s>"], "Cmd": ["a b"]}, ["c", "d"], "<c><d>"),
        ({"Entrypoint": ["printf", "it's"]}, [], "it's"),
        ({"Cmd": ["printf", "%s", "$HOME"]}, [], "$HOME"),
        ({"Cmd": ["false"]}, ["printf", "x"], "x"),
        ({}, ["printf", "x"], "x"),
        ({"Entrypoint": None, "Cmd": None, "Env": None, "Volumes": None}, ["pwd"], "/\n"),
        ({"WorkingDir": "/tmp"}, ["pwd"], "/tmp\n"),
    ],
)
def test_the_start_script_does_what_the_image_says(
    tmp_path: Path, config: dict[str, Any], arguments: list[str], printed: str
) -> None:
    script = tmp_path / "rc"
    script.write_text(files(config)["etc/rc"].replace("/etc/rc.local", f"{tmp_path}/rc.local"))
    ran = subprocess.run(["sh", script, *arguments], capture_output=True, text=True, check=True)
    assert ran.stdout == printed
    # What pyxis writes there to leave the entrypoint out.
    (tmp_path / "rc.local").write_text('exec "$@"\n')
    ran = subprocess.run(["sh", script, "echo", "y"], capture_output=True, text=True, check=True)
    assert ran.stdout == "y\n"


@given(st.lists(st.binary(max_size=40)), st.lists(st.integers(1, 50)))
def test_a_stream_of_chunks_reads_like_a_file(chunks: list[bytes], sizes: list[int]) -> None:
    chunks = [chunk for chunk in chunks if chunk]
    whole = io.BytesIO(b"".join(chunks))
    stream = _Stream(iter(chunks))
    for size in sizes:
        assert stream.read(size) == whole.read(size)
    assert stream.read() == whole.read()


def test_owners_modes_and_links_stay() -> None:
    source = io.BytesIO()
    with tarfile.open(fileobj=source, mode="w") as archive:
        kinds = {"a": tarfile.REGTYPE, "b": tarfile.LNKTYPE, "c": tarfile.SYMTYPE}
        for (name, kind), link in zip(kinds.items(), ("", "a", "/a"), strict=True):
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.mode, member.uid = kind, link, 0o4711, 7
            archive.addfile(member)
    found = rewritten(source.getvalue(), {})
    assert (found["a"].mode, found["a"].uid) == (0o4711, 7)
    assert (found["b"].islnk(), found["b"].linkname) == (True, "a")
    assert (found["c"].issym(), found["c"].linkname) == (True, "/a")


def test_a_stream_that_is_cut_is_an_error() -> None:
    source = io.BytesIO()
    with tarfile.open(fileobj=source, mode="w") as archive:
        member = tarfile.TarInfo("a")
        member.size = 100_000
        archive.addfile(member, io.BytesIO(os.urandom(100_000)))
    with pytest.raises((tarfile.TarError, OSError)):
        rewritten(source.getvalue()[:50_000], {})
