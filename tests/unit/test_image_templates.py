"""The CI templates call the commands as they are: an option that is renamed breaks a test here."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

import pytest
import typer
from typer.testing import CliRunner

from toolkit.commands import build, push, smoke

if TYPE_CHECKING:
    from pathlib import Path

app = typer.Typer()
for command in (build.build, push.push, smoke.smoke):
    app.command()(command)


@pytest.mark.parametrize("template", ["ci/github/image.yml", "ci/gitlab/image.yml"])
def test_each_command_of_a_template_is_one_that_the_toolkit_takes(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    root: Path = pytestconfig.rootpath
    text = (root / template).read_text()
    monkeypatch.chdir(root)
    calls = re.findall(r"^[^#\n]*?\btoolkit ((?:build|smoke|push) [^|>\n]*)", text, re.MULTILINE)
    assert [call.split()[0] for call in calls] == ["build", "smoke", "push"]
    for call in calls:
        arguments = shlex.split(re.sub(r"\$\w+", "reg.example/team/pyg:1", call))
        result = CliRunner().invoke(app, [*arguments, "--dry-run"], catch_exceptions=False)
        assert result.exit_code == 0, result.output
