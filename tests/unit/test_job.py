"""From options to a JobSpec, and from a Plan to a script."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.config import Setting
from toolkit.decide import make_spec
from toolkit.errors import UsageError
from toolkit.options import JobSpec, seconds, variables
from toolkit.plan import Plan, Process


def spec(command: tuple[str, ...] = (), **options: Any) -> JobSpec:
    settings = {key: Setting(value, f"--{key}") for key, value in options.items()}
    return make_spec(settings, list(command), explicit_command=True)


@pytest.mark.parametrize(
    ("options", "nodes", "per_node", "gpus"),
    [
        ({}, 1, 1, None),
        ({"nodes": 2}, 2, 1, None),
        ({"nodes": 2, "gpus_per_node": 4}, 2, 4, 4),
        ({"nodes": 2, "gpus_per_node": 4, "ntasks_per_node": 1}, 2, 1, 4),
        ({"nodes": 2, "ntasks": 8}, 2, 4, None),
        ({"ntasks": 4}, 1, 4, None),
        ({"ntasks": 8, "ntasks_per_node": 4}, 2, 4, None),
        ({"nodes": 2, "ntasks": 8, "gpus_per_task": 1}, 2, 4, 4),
        ({"nodes": 2, "ntasks_per_node": 4, "gpus_per_task": 2}, 2, 4, 8),
        ({"gpus_per_node": 0}, 1, 1, 0),
    ],
)
def test_tutorial_flags_become_the_per_node_form(
    options: dict[str, Any], nodes: int, per_node: int, gpus: int | None
) -> None:
    found = spec(**options)
    assert (found.nodes, found.ntasks_per_node, found.gpus_per_node) == (nodes, per_node, gpus)


@pytest.mark.parametrize(
    "options",
    [
        {"nodes": 0},
        {"nodes": -1},
        {"ntasks_per_node": 0},
        {"cpus_per_task": 0},
        {"nodes": 2, "ntasks": 3},
        {"nodes": 2, "ntasks": 8, "ntasks_per_node": 2},
        {"gpus_per_node": 4, "gpus_per_task": 2, "ntasks_per_node": 4},
        {"launcher": "mpirun"},
        {"rendezvous": "tcp"},
        {"time": "soon"},
        {"time": "0"},
    ],
)
def test_contradictions_and_nonsense_are_usage_errors(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"--\w+"):
        spec(**options)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("30", 1800),
        ("1:30", 90),
        ("12:00:00", 43200),
        ("1-0", 86400),
        ("1-2:3", 93780),
        ("2-00:00:01", 172801),
    ],
)
def test_time_limits_are_read_as_slurm_reads_them(text: str, expected: int) -> None:
    assert seconds(text, "--time") == expected


@pytest.mark.parametrize("text", ["", "1-", "a", "1:2:3:4", "1.5", "-5", "1-1:2:3:4", "0:00"])
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        seconds(text, "--time")


def test_env_values_keep_every_character() -> None:
    found = variables(["A=x=y, z", "B=", "TOKEN", "A=last"])
    assert dict(found) == {"A": "last", "B": "", "TOKEN": None}


@pytest.mark.parametrize("item", ["", "=x", "1A=x", "A B=x", "A-B", "A=\0"])
def test_env_names_are_checked(item: str) -> None:
    with pytest.raises(UsageError):
        variables([item])


def test_secrets_are_neither_recorded_nor_printed() -> None:
    job = spec(("true",), env=["WANDB_API_KEY=hunter2", "LR=0.1"])
    assert "hunter2" not in repr(job.as_dict())
    assert job.as_dict()["env"]["LR"] == "0.1"
    plan = Plan("t", Path("/r"), Path("/"), ("true",), (Process(("true",)),), env=job.env_values)
    assert "hunter2" not in plan.script()


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (("python", "train.py", "x.sh"), "train"),
        (("python3", "/a/b/main.py"), "main"),
        (("bash", "run.sh"), "run"),
        (("/usr/bin/env", "true"), "env"),
        (("/",), "job"),
    ],
)
def test_a_job_is_named_after_its_script(command: tuple[str, ...], name: str) -> None:
    assert spec(command).job_name == name


WORD = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)


@given(arguments=st.lists(WORD, max_size=5), value=WORD)
def test_a_pasted_plan_keeps_arguments_and_variables_byte_for_byte(
    arguments: list[str], value: str
) -> None:
    show = 'import os, sys; print(ascii((sys.argv[1:], os.environ["NOTE"])))'
    plan = Plan(
        title="test",
        run_dir=Path("/nowhere"),
        cwd=Path("/"),
        stage=("true",),
        processes=(Process(("python3", "-I", "-S", "-c", show, *arguments)),),
        env={"NOTE": value, "PYTHONUTF8": "1"},
    )
    ran = subprocess.run(
        ["bash"], input=plan.script().encode(), capture_output=True, check=True, timeout=30
    )
    assert ran.stdout.decode().strip() == ascii((arguments, value))
