"""The batch script: cases of kinds 1 and 8 by id, its whole text, and what bash makes of it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.jobs import decided
from tests.unit.golden import check_golden, shellcheck
from toolkit.errors import UsageError
from toolkit.slurm import sbatch
from toolkit.targets import slurm

if TYPE_CHECKING:
    from toolkit.plan import Plan

CWD = Path("/home/u/run dir")
RUN = Path("/home/u/runs/train-1")
IMAGE = "nvcr.io/nvidia/pyg:24.01-py3"


def plan(environ: dict[str, str] | None = None, *, path: Path = RUN, **options: Any) -> Plan:
    return slurm.plan(decided(environ, batch=True, cwd=CWD, run_dir=path, **options))


def text(environ: dict[str, str] | None = None, **options: Any) -> str:
    return plan(environ, **options).files["batch.sh"]


def head(**options: Any) -> list[str]:
    lines = text(**options).splitlines()
    return [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]


def srun_line(**options: Any) -> str:
    script = text(**options)
    return script[script.index("\nsrun ") : script.index("\ntoolkit_code=$?")]


def test_case_1_5_and_8_1_container_flags_stand_on_the_srun_line_only() -> None:
    options: dict[str, Any] = {"container_image": "registry.example.com:5443/team/img:1"}
    assert not [line for line in head(**options) if "container" in line]
    assert "--container-image=registry.example.com:5443#team/img:1" in srun_line(**options)
    assert "\\#" not in text(**options)
    assert "--export=ALL" in head(**options)
    assert "--export=ALL" in srun_line(**options)


def test_case_8_4_cpus_are_said_twice() -> None:
    assert "--cpus-per-task=8" in head(cpus_per_task=8)
    assert "--cpus-per-task=8" in srun_line(cpus_per_task=8)


def test_case_8_10_tasks_are_said_twice() -> None:
    options = {"cpus_per_task": 2, "sbatch_arg": ("--exclusive",)}
    for flag in ("--nodes=1", "--ntasks=1", "--ntasks-per-node=1"):
        assert flag in head(**options)
        assert f"{flag} " in srun_line(**options)
    assert "--exclusive" in head(**options)


def test_case_8_10_gpus_of_sbatchs_own_are_not_bound() -> None:
    assert "--gpu-bind=none" in srun_line(sbatch_arg=("--gres=gpu:2",))


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("Big simulation", '"Big simulation"'),
        ("a#b", '"a#b"'),
        ('say "hi"', '"say \\"hi\\""'),
        ("it's", '"it\'s"'),
        ("back\\slash", '"back\\\\slash"'),
        ("$HOME", '"$HOME"'),
        ("plain-1.2_3", "plain-1.2_3"),
        ("", '""'),
    ],
)
def test_case_8_5_header_values_are_quoted(value: str, written: str) -> None:
    assert sbatch.header_word(f"--comment={value}").removeprefix("--comment=") == (
        written if value else ""
    )
    assert sbatch.header_word(value) == written


def test_case_8_5_names_and_folders_with_spaces() -> None:
    found = head(job_name="Big simulation")
    assert '--job-name="Big simulation"' in found
    assert '--chdir="/home/u/run dir"' in found


@pytest.mark.parametrize(
    "options",
    [{"job_name": "a\nb"}, {"partition": "a\rb"}, {"sbatch_arg": ("--comment=a\n#SBATCH -N9",)}],
)
def test_case_8_5_a_line_break_in_the_head_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="line break"):
        text(**options)


@pytest.mark.parametrize("path", ["/runs/100%", "/runs/a\\b", "/runs/a\nb", "/runs/it's"])
def test_a_run_directory_that_slurm_would_misread_names_the_way_out(path: str) -> None:
    with pytest.raises(UsageError, match="--runs"):
        text(path=Path(path))


@pytest.mark.parametrize(
    ("options", "signal"),
    [
        ({"time": 43200}, "TERM@120"),
        ({"time": 600}, "TERM@120"),
        ({"time": 60}, None),
        ({}, None),
        ({"signal": "USR2@60"}, "USR2@60"),
        ({"signal": "10", "time": 60}, "10"),
        ({"signal": "R:TERM@60"}, "R:TERM@60"),
    ],
)
def test_case_8_7_ranks_are_warned_before_the_time_limit(
    options: dict[str, Any], signal: str | None
) -> None:
    found = [line.removeprefix("--signal=") for line in head(**options) if "--signal" in line]
    assert found == ([signal] if signal else [])


def test_case_8_7_signals_that_do_not_do_what_is_meant() -> None:
    composed = plan(signal="USR1@120")
    assert "#SBATCH --signal=USR1@120" in composed.files["batch.sh"]
    assert any("USR1" in note and "USR2" in note for note in composed.notes)
    with pytest.raises(UsageError, match="B:"):
        plan(signal="B:USR2@120")
    for wrong in ("@120", "USR2@", "usr2@soon", "USR2 120"):
        with pytest.raises(UsageError, match="--signal"):
            plan(signal=wrong)


def test_case_8_7_the_script_asks_for_the_job_again() -> None:
    assert "--requeue" in head()
    assert "scontrol requeue" in text()
    assert "--no-requeue" in head(requeue=False)
    assert "scontrol requeue" not in text(requeue=False)


def test_case_8_9_sbatch_sees_nothing_of_an_outer_job() -> None:
    outer = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SBATCH_PARTITION": "p", "PMIX_RANK": "0"}
    environ = {**outer, "SLURM_CONF": "/c", "HOME": "/h"}
    composed = plan(environ)
    seen = composed.environment(composed.processes[0], environ)
    assert seen == {"SLURM_CONF": "/c", "HOME": "/h"}
    assert composed.processes[0].argv == ("sbatch", "--parsable", f"{RUN}/batch.sh")


def test_secrets_are_in_no_text() -> None:
    environ = {"HF_TOKEN": "hunter1"}
    composed = plan(environ, env=(("WANDB_API_KEY", "hunter2"),), env_names=("HF_TOKEN",))
    assert "hunter" not in composed.script() + composed.files["batch.sh"]
    seen = composed.environment(composed.processes[0], environ)
    assert (seen["HF_TOKEN"], seen["WANDB_API_KEY"]) == ("hunter1", "hunter2")


@pytest.mark.parametrize("name", ["UID", "SECONDS", "IFS", "BASH_ENV"])
def test_names_that_bash_uses_itself_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=name):
        plan(env=((name, "1"),))


@pytest.mark.parametrize(
    "extra",
    [
        ("--nodes=4",), ("-N4",), ("--gpus-per-task=1",), ("--output=/tmp/x",), ("-o", "/tmp/x"),
        ("--export=NONE",), ("--no-requeue",), ("--wrap=hostname",), ("--ntasks=1",),
    ],
)  # fmt: skip
def test_a_contradiction_is_named(extra: tuple[str, ...]) -> None:
    composed = plan(nodes=2, sbatch_arg=extra)
    assert any(extra[0] in note for note in composed.notes) == (extra != ("--no-requeue",))
    assert f"#SBATCH {' '.join(extra)}" in composed.files["batch.sh"]


def test_login_node_software_is_unset_in_the_script_for_containers_only() -> None:
    assert "PYTHONHOME" not in text()
    assert "unset PYTHONHOME " in text(container_image=IMAGE)
    kept = text(container_image=IMAGE, env_names=("LD_PRELOAD",), environ={"LD_PRELOAD": "x"})
    (line,) = [line for line in kept.splitlines() if "unset PYTHONHOME" in line]
    assert "LD_PRELOAD" not in line
    conda = {"CONDA_EXE": "/c", "CONDA_PREFIX": "/p", "CONDA_SHLVL": "1"}
    kept = text(conda, container_image=IMAGE, env_names=("CONDA_EXE",))
    (line,) = [line for line in kept.splitlines() if "unset PYTHONHOME" in line]
    assert "CONDA_EXE" not in line
    assert "!CONDA_@" not in line
    assert " CONDA_PREFIX CONDA_SHLVL " in line


def test_options_of_a_batch_job() -> None:
    found = head(array="0-9%4", dependency="afterok:12?afterany:13", hold=True)
    assert "--array=0-9%4" in found
    assert '--dependency="afterok:12?afterany:13"' in found
    assert "--hold" in found
    assert f"--output={RUN}/logs/srun-%a.log" in found


# What bash makes of the body: run with an srun that shows what it was given.
SHOW = """#!/bin/sh
for word; do printf '%s\\0' "$word"; done >"$SHOWN_ARGV"
env -0 >"$SHOWN_ENV"
exit 7
"""
WORD = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8)


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("harness") / "a folder, with $signs"
    folder.mkdir()
    (folder / "srun").write_text(SHOW)
    (folder / "srun").chmod(0o755)
    return folder


def carry_out(
    harness: Path, script: str, **variables: str
) -> tuple[int, list[str], dict[str, str]]:
    argv, env = harness / "argv", harness / "env"
    ran = subprocess.run(
        ["/bin/bash", "-c", script],
        env={
            "PATH": f"{harness}:/usr/bin:/bin",
            "SHOWN_ARGV": str(argv),
            "SHOWN_ENV": str(env),
            "SLURM_JOB_ID": "42",
            "SLURM_JOB_NODELIST": "node01",
            **variables,
        },
        capture_output=True,
        timeout=30,
        check=False,
    )
    seen = dict(item.split("=", 1) for item in env.read_bytes().decode().split("\0") if item)
    return ran.returncode, argv.read_bytes().decode().split("\0")[:-1], seen


def in_harness(harness: Path, run: Path, python: str = "/none") -> dict[str, Any]:
    return {"batch": True, "cwd": harness, "run_dir": run, "python": python}


@settings(deadline=None, max_examples=40)
@given(arguments=st.lists(WORD.filter(lambda word: word != ":"), max_size=5), value=WORD)
def test_case_8_2_and_8_5_bash_passes_every_byte_on(
    harness: Path, arguments: list[str], value: str
) -> None:
    script, _ = sbatch.script(
        decided(
            command=("python", *arguments),
            env=(("NOTE", value), ("EMPTY", "")),
            srun_arg=("--comment=it's $HOME",),
            **in_harness(harness, harness / "run"),
        )
    )
    assert "\r" not in script, "sbatch takes it for a script of another system"
    _, argv, env = carry_out(harness, script)
    assert argv[-len(arguments) - 1 :] == ["python", *arguments]
    assert "--comment=it's $HOME" in argv
    assert "--label" in argv, "each rank writes its own log; what srun passes on is labelled"
    assert (env["NOTE"], env["EMPTY"]) == (value, "")


def test_what_only_the_job_knows_is_filled_in(harness: Path) -> None:
    script, _ = sbatch.script(
        decided(
            command=("a",),
            array="0-3",
            rendezvous="file",
            container_image=IMAGE,
            container_name="pyg",
            container_mounts=("/data:/data",),
            **in_harness(harness, harness / "run"),
        )
    )
    (harness / "run").mkdir()
    for name in ("entrypoint.pyz", "run.json"):
        (harness / "run" / name).touch()
    leak = {"PYTHONHOME": "/p", "CONDA_PREFIX": "/c", "SLURM_TRES_PER_TASK": "cpu=3"}
    _, argv, env = carry_out(
        harness, script, SLURM_ARRAY_TASK_ID="3", SLURM_RESTART_COUNT="2", **leak
    )
    assert "--container-name=pyg-42" in argv
    assert f"--container-mounts=/data:/data,{harness}/run_3:/toolkit-run" in argv
    assert env["TOOLKIT_INIT_METHOD"] == "file:///toolkit-run/rendezvous-42-2"
    assert not set(leak) & set(env)
    assert (harness / "run_3" / "entrypoint.pyz").exists()


@pytest.mark.parametrize(("launcher", "task"), [("srun", "rank"), ("torchrun", "node")])
def test_case_10_4_what_an_attempt_left_is_kept_apart(
    harness: Path, launcher: str, task: str
) -> None:
    run = harness / f"again-{task}"
    job = decided(command=("a",), launcher=launcher, **in_harness(harness, run))
    for name in ("ranks", "logs"):
        (run / name).mkdir(parents=True)
    left = {f"logs/{task}-0.log": "its last words", "ranks/0.json": "{}", "result-0.json": "{}"}
    for name, content in {**left, "logs/srun.log": "what Slurm said"}.items():
        (run / name).write_text(content)
    carry_out(harness, sbatch.script(job)[0], SLURM_RESTART_COUNT="1")
    kept = run / "before-restart-1"
    assert (kept / f"{task}-0.log").read_text() == "its last words"
    assert (kept / "srun.log").read_text() == "what Slurm said"
    assert (kept / "ranks" / "0.json").exists()
    assert (kept / "result-0.json").exists()
    assert not list((run / "logs").glob(f"{task}-*"))
    assert list((run / "ranks").iterdir()) == []


def test_case_10_4_the_scripts_exit_code_is_what_finish_says_or_sruns(harness: Path) -> None:
    run = harness / "finished"
    run.mkdir()
    (run / "entrypoint.pyz").write_text("import sys; sys.exit(int(sys.argv[3]) + 50)")

    def code(python: str, **path: str) -> int:
        job = decided(command=("a",), **in_harness(harness, run, python))
        script, _ = sbatch.script(job)
        return carry_out(harness, script, **path)[0]

    assert code("/usr/bin/python3") == 57
    tools = harness / "tools"
    tools.mkdir()
    (tools / "env").symlink_to("/usr/bin/env")
    assert code("/none", PATH=f"{harness}:{tools}") == 7, "no Python on the node"
    old = tools / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    assert code(str(old), PATH=f"{harness}:{tools}") == 7, "a Python that is too old"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sbatch-plain", {"nodes": 2, "ntasks_per_node": 4, "cpus_per_task": 8, "time": 43200}),
        (
            "sbatch-container",
            {
                "nodes": 2,
                "ntasks_per_node": 4,
                "gpus_per_node": 4,
                "container_image": IMAGE,
                "container_mounts": ("/data:/data:ro,rprivate", ".:/workspace"),
                "env": (("NOTE", "it's $5; ok"), ("WANDB_API_KEY", "x")),
                "job_name": "Big simulation",
                "partition": "gpu",
            },
        ),
        (
            "sbatch-array",
            {"array": "0-9%4", "workload": "sage", "command": (), "rendezvous": "file"},
        ),
        ("sbatch-torchrun", {"nodes": 2, "ntasks_per_node": 4, "launcher": "torchrun"}),
        (
            "sbatch-odd",
            {
                "command": ("python", "train.py", "sampling=c(4,2*7)", "it's $HOME", "", ":"),
                "sbatch_arg": ("--comment=a # b", "--mail-type", "END"),
                "srun_arg": ("--mpi=pmix",),
                "signal": "USR2@300",
                "requeue": False,
                "hold": True,
            },
        ),
    ],
)
def test_golden(name: str, options: dict[str, Any]) -> None:
    composed = plan(nodes=options.pop("nodes", 1), **options)
    check_golden(f"{name}.sh", composed.files["batch.sh"])
    shellcheck(composed.script())
