"""The table of options: every form of each option is derived from it, and something takes it."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from toolkit import config, decide
from toolkit.cli import app
from toolkit.enroot import images
from toolkit.options import JobSpec, Option, Said, table
from toolkit.targets import load

ROOT = Path(__file__).parents[2]
OPTIONS = list(table().values())

#: As a user writes them, where not any word or number will do.
SAMPLES: dict[str, Any] = {
    "ntasks": 6,
    "time": "90",
    "launcher": "torchrun",
    "rendezvous": "file",
    "container_image": "nvcr.io/nvidia/pyg:24.01-py3",
    "container_mounts": ["/:/host"],
    "container_workdir": "/host",
    "env": ["NOTE=a b"],
    "on": "docker",
    "signal": "USR2@60",
    "array": "0-3",
    "srun_arg": ["--mpi=pmix"],
    "sbatch_arg": ["--exclusive"],
    "pyxis_flags": ["container-image", "container-mounts", "container-workdir"],
}
#: Without a container these have nothing to say.
IN_CONTAINER = {"container_image": "ubuntu:24.04"}


def sample(option: Option) -> Any:
    by_kind = {int: 3, str: "x7", bool: not option.default, list: ["x7"]}
    return SAMPLES.get(option.key, by_kind[option.kind])


def in_toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value).replace("'", '"')


def helped(command: str) -> str:
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "300", "NO_COLOR": "1"})
    assert shown.exit_code == 0
    return shown.output


HELP = {command: helped(command) for command in ("run", "submit")}


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.key)
def test_the_command_line_has_its_flags_and_help(option: Option) -> None:
    for command, text in HELP.items():
        wanted = bool(option.flags) and (command == "submit" or not option.batch)
        for flag in (name for flags in option.flags for name in flags.split("/")):
            assert bool(re.search(rf"(?<![\w-]){flag}(?![\w-])", text)) == wanted, (command, flag)
        assert ("".join(option.help.split()) in "".join(text.split())) == wanted, command


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.key)
def test_file_variable_and_command_line_say_the_same(option: Option, tmp_path: Path) -> None:
    value = sample(option)
    found = [config.settings({option.key: value}, {}, tmp_path)[option.key]]
    (tmp_path / config.FILE_NAME).write_text(
        f"[job]\n{option.key.replace('_', '-')} = {in_toml(value)}\n"
    )
    found.append(config.settings({}, {}, tmp_path)[option.key])
    (tmp_path / config.FILE_NAME).unlink()
    if option.variable:
        shown = " ".join(map(repr, value)) if option.kind is list else str(value)
        found.append(config.settings({}, {option.variable: shown}, tmp_path)[option.key])
    assert [setting.value for setting in found] == [value] * len(found)
    if option.flags:
        assert found[0].source.startswith(option.flags[-1].split("/")[0][:2])
    spec = decide.make_spec({option.key: found[0]}, ["true"], explicit_command=True)
    field = getattr(spec, option.key)
    expected = option.read(value, "") if option.read else value
    if option.key == "ntasks":
        assert (spec.world_size, field) == (value, None), "it is folded into the per-node form"
    elif option.key == "gpus_per_task":
        assert (spec.gpus_per_node, field) == (value, None)
    else:
        assert field == (tuple(expected) if isinstance(expected, list) else expected)


def test_a_field_of_the_job_is_an_option_or_what_is_run() -> None:
    fields = {field.name for field in dataclasses.fields(JobSpec)}
    assert fields - set(table()) == {"command", "workload", "workload_args"}


class Outcome:
    """What came of settings: the plans of run and submit, and what else was asked."""

    def __init__(self, cwd: Path, given: dict[str, Any], patch: pytest.MonkeyPatch) -> None:
        self.asked: list[Any] = []
        patch.setattr(images, "resolve", self._resolve)
        self.lines: dict[str, list[str]] = {}
        self.seen: list[Any] = []
        settings = config.settings({"on": "slurm", **given}, {}, cwd)
        for batch in (False, True):
            if batch and given.get("on"):
                continue
            job = decide.decide(
                settings, ["true"], explicit_command=True, cwd=cwd, environ={}, batch=batch
            )
            job = dataclasses.replace(job.at(job.runs / "x"), record={})
            plan = load(job.target).plan(job)
            # The grace is no part of a plan: it counts while the job is watched.
            self.seen += [job.target, plan, job.spec.grace]
            self.lines["batch" if batch else "run"] = list(plan.processes[0].argv)
            self.lines["head"] = [
                line.removeprefix("#SBATCH ")
                for text in plan.files.values()
                for line in text.splitlines()
                if line.startswith("#SBATCH ")
            ]
            self.lines["step"] = [
                word
                for text in plan.files.values()
                for word in text[text.index("\nsrun ") :].split("\n")[1:]
            ]

    def _resolve(self, image: Any, folder: Any, environ: Any, **given: Any) -> None:
        del image, environ, given["say"]
        self.asked.append((folder.path, given))


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.key)
def test_something_takes_it(
    option: Option, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option of which nothing comes was dropped in silence."""
    around = IN_CONTAINER if option.key != "container_image" else {}
    if option.key == "rendezvous":
        around = {}
    without = Outcome(tmp_path, around, monkeypatch)
    given = Outcome(tmp_path, {**around, option.key: sample(option)}, monkeypatch)
    assert (given.seen, given.asked) != (without.seen, without.asked)


@pytest.mark.parametrize(
    "option", [one for one in OPTIONS if one.said is not Said.NOWHERE], ids=lambda one: one.key
)
def test_slurm_is_told_where_the_table_says(
    option: Option, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = sample(option)
    lines = Outcome(tmp_path, {**IN_CONTAINER, option.key: value}, monkeypatch).lines
    spec = decide.make_spec(
        config.settings({option.key: value}, {}, tmp_path), ["true"], explicit_command=True
    )
    words = option.words(spec)
    if option.said is Said.AS_WRITTEN:
        words = value
    elif option.said is Said.PYXIS:
        words = [f"--{option.slurm}"]
    assert words
    where = {
        Said.LAYOUT: {"run", "head", "step"},
        Said.JOB: {"run", "head"},
        Said.LIMIT: {"run", "head"},
        Said.HEAD: {"head"},
        Said.PYXIS: {"run", "step"},
        Said.AS_WRITTEN: {"head"} if option.batch else {"run", "step"},
    }[option.said]
    for place in ("run", "head", "step"):
        text = [line.strip(" \\\t").replace("'", "") for line in lines[place]]
        for word in words:
            found = any(line.startswith(word) or f" {word}" in line for line in text)
            assert found == (place in where), (place, word)


def test_the_reference_is_made_from_the_table() -> None:
    ran = subprocess.run(
        [sys.executable, "ci/reference.py", "--check"], cwd=ROOT, capture_output=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
