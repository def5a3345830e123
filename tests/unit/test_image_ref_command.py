"""``toolkit image ref``, as a script would call it."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from toolkit.commands.image import ref
from toolkit.errors import UsageError

app = typer.Typer()
app.command()(ref)

HEX = "0123456789abcdef" * 4


def show(*args: str) -> str:
    result = CliRunner().invoke(app, args, catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_json_has_the_parts_and_the_spellings() -> None:
    shown = json.loads(show(f"ada@reg.example:5005/team/img:1@sha256:{HEX}", "--json"))
    assert shown == {
        "registry": "reg.example:5005",
        "path": "team/img",
        "tag": "1",
        "digest": f"sha256:{HEX}",
        "user": "ada",
        "docker": f"reg.example:5005/team/img@sha256:{HEX}",
        "enroot": f"docker://ada@reg.example:5005#team/img:sha256:{HEX}",
        "pyxis": f"ada@reg.example:5005#team/img:sha256:{HEX}",
        "sbatch": f'#SBATCH --container-image="ada@reg.example:5005#team/img:sha256:{HEX}"',
    }


def test_a_squashfs_file_has_no_docker_spelling() -> None:
    shown = json.loads(show("pyg.sqsh", "--json"))
    assert (shown["docker"], shown["pyxis"], shown["registry"]) == (None, "./pyg.sqsh", None)


def test_text_is_one_line_a_tool() -> None:
    lines = show("nvcr.io/nvidia/pyg:1").splitlines()
    assert lines[2] == "pyxis   nvcr.io#nvidia/pyg:1"
    assert [line.split()[0] for line in lines] == ["docker", "enroot", "pyxis", "sbatch"]


def test_malformed_is_exit_2() -> None:
    with pytest.raises(UsageError, match=r"nvcr\.io/nvidia/PyG"):
        CliRunner().invoke(app, ["nvcr.io/nvidia/PyG"], catch_exceptions=False)
