"""The srun line: cases of kinds 4, 5, 8 and 10 by id, and the text as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.jobs import decided
from tests.unit.golden import check_golden
from toolkit.errors import UnavailableError, UsageError
from toolkit.options import slurm_time
from toolkit.targets import slurm

if TYPE_CHECKING:
    from toolkit.plan import Plan

CWD = Path("/home/u/proj")
RUN = Path("/home/u/proj/runs/train-1")
IMAGE = "nvcr.io/nvidia/pyg:24.01-py3"
JOB = {
    "SLURM_JOB_ID": "12",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "node[01-02]",
    "SLURM_JOB_CPUS_PER_NODE": "8(x2)",
    "SLURM_NTASKS": "8",
}


def plan(environ: dict[str, str] | None = None, **options: Any) -> Plan:
    return slurm.plan(decided(environ, cwd=CWD, run_dir=RUN, **options))


def argv(environ: dict[str, str] | None = None, **options: Any) -> list[str]:
    (process,) = plan(environ, **options).processes
    return list(process.argv)


def flags(environ: dict[str, str] | None = None, **options: Any) -> dict[str, str]:
    """What stands before the interpreter."""
    words = argv(environ, **options)
    words = words[1 : words.index("-I") - 1]
    return {word.partition("=")[0]: word.partition("=")[2] for word in words}


def test_a_job_says_everything() -> None:
    found = flags(
        nodes=2,
        ntasks_per_node=4,
        gpus_per_node=4,
        cpus_per_task=8,
        mem="64G",
        partition="gpu",
        account="gnn",
        qos="high",
        constraint="a100&ib",
        time=5400,
    )
    assert found == {
        "--nodes": "2",
        "--ntasks": "8",
        "--ntasks-per-node": "4",
        "--gpus-per-node": "4",
        "--gpu-bind": "none",
        "--cpus-per-task": "8",
        "--mem": "64G",
        "--partition": "gpu",
        "--account": "gnn",
        "--qos": "high",
        "--constraint": "a100&ib",
        "--time": "0-01:30:00",
        "--job-name": "train",
        "--kill-on-bad-exit": "1",
        "--export": "ALL",
        "--input": "none",
        "--label": "",
    }


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 1), (2, 1), (2, 4), (3, 8)])
@pytest.mark.parametrize("environ", [{}, JOB], ids=["job", "step"])
def test_case_4_2_and_8_10_tasks_are_always_given_for_each_node(
    nodes: int, per_node: int, environ: dict[str, str]
) -> None:
    if environ and nodes == 3:
        with pytest.raises(UnavailableError):
            flags(environ, nodes=nodes, ntasks_per_node=per_node)
        return
    found = flags(environ, nodes=nodes, ntasks_per_node=per_node)
    assert found["--nodes"] == str(nodes)
    assert found["--ntasks"] == str(nodes * per_node)
    assert found["--ntasks-per-node"] == str(per_node)


@pytest.mark.parametrize(
    "extra",
    [
        ("--gpus-per-task=1",), ("--gres=gpu:2",), ("--gpus=4",), ("-G", "4"), ("-G4",),
        ("--tres-per-task=gres/gpu:1",), ("--gpus-per-node", "2"), ("--gpus-per-socket=1",),
    ],
)  # fmt: skip
def test_case_5_5_gpus_are_never_bound_one_to_a_rank(extra: tuple[str, ...]) -> None:
    assert flags(nodes=2, srun_arg=extra)["--gpu-bind"] == "none"


def test_case_5_5_no_gpus_no_binding() -> None:
    assert "--gpu-bind" not in flags()
    assert "--gpu-bind" not in flags(gpus_per_node=0)
    assert "--gpu-bind" not in flags(srun_arg=("--gres=license:1",))


@pytest.mark.parametrize(
    "extra",
    [
        ("--gpu-bind=closest",), ("--gpu-bind", "single:1"), ("--tres-bind=gres/gpu:single:1",),
        ("--gpus-per-task=1",), ("--ntasks=3",), ("-n", "3"), ("-n3",), ("--ntasks-per-node=1",),
        ("--ntasks-per-gpu=1",), ("--nodes=1",), ("-N1",), ("--export=NONE",), ("--export=FOO=1",),
        ("--export", "NONE"), ("--kill-on-bad-exit=0",), ("-K0",), ("--cpus-per-task=1",),
        ("--gres=gpu:1",), ("--multi-prog",), ("--pty",), ("--output=/tmp/x",), ("-o", "/tmp/x"),
        ("--input=all",), ("--chdir=/tmp",), ("-D", "/tmp"),
    ],
)  # fmt: skip
def test_a_contradiction_is_named_and_the_user_wins(extra: tuple[str, ...]) -> None:
    options: dict[str, Any] = {"nodes": 2, "ntasks_per_node": 4, "gpus_per_node": 4}
    composed = plan(**options, cpus_per_task=4, srun_arg=extra)
    words = composed.processes[0].argv
    at = words.index(extra[0])
    assert words[at : at + len(extra)] == extra
    assert words[at + len(extra) :][1:3] == ("-I", "-S"), "the user's arguments stand last"
    assert any(extra[0] in note for note in composed.notes)


@pytest.mark.parametrize(
    "extra",
    [
        ("--gpu-bind=none",), ("-N2",), ("--nodes", "2"), ("--kill-on-bad-exit",), ("-K1",),
        ("--export=ALL",), ("--export=ALL,FOO=1",), ("--exclusive",), ("--reservation=r",),
        ("--mpi=pmix",), ("-v",), ("--mail-type", "END"), ("--network", "sn_all"),
    ],
)  # fmt: skip
def test_what_contradicts_nothing_is_not_remarked(extra: tuple[str, ...]) -> None:
    assert plan(nodes=2, gpus_per_node=4, srun_arg=extra).notes == ()


@pytest.mark.parametrize(
    ("extra", "gone"),
    [
        ("--container-workdir=/x", "--container-workdir=/workspace"),
        ("--container-mount-home", "--no-container-mount-home"),
        ("--container-env=A", "--container-env="),
        ("--container-readonly", "--container-writable"),
    ],
)
def test_pyxis_is_told_a_thing_once(extra: str, gone: str) -> None:
    composed = plan(container_image=IMAGE, container_writable=True, srun_arg=(extra,))
    words = composed.processes[0].argv
    assert extra in words
    assert not [word for word in words if word.startswith(gone) and word != extra]
    assert any(extra in note for note in composed.notes)


@pytest.mark.parametrize("image", [None, IMAGE])
@pytest.mark.parametrize("extra", ["--container-image=x", "--container-mounts=/a:/a"])
def test_a_container_is_asked_for_by_our_own_options(extra: str, image: str | None) -> None:
    with pytest.raises(UsageError, match="--container-"):
        plan(container_image=image, srun_arg=(extra,))


def test_case_8_1_the_environment_is_exported_whole() -> None:
    composed = plan(env=(("NCCL_DEBUG", "INFO"), ("NCCL_IB_HCA", "mlx5_0,mlx5_1")))
    assert [w for w in composed.processes[0].argv if "export" in w] == ["--export=ALL"]
    assert composed.env["NCCL_IB_HCA"] == "mlx5_0,mlx5_1"


def test_case_10_4_one_bad_exit_ends_the_step() -> None:
    assert flags()["--kill-on-bad-exit"] == "1"
    assert flags(JOB)["--kill-on-bad-exit"] == "1"


def test_a_step_takes_what_its_job_has() -> None:
    options = {"partition": "gpu", "account": "a", "qos": "q", "constraint": "c", "mem": "1G"}
    composed = plan(JOB, nodes=2, **options)
    found = flags(JOB, nodes=2, **options)
    assert (found["--jobid"], found["--overlap"], found["--mem"]) == ("12", "", "1G")
    for name in ("partition", "account", "qos", "constraint"):
        assert f"--{name}" not in found
        assert any(f"--{name}" in note for note in composed.notes)
    assert "SLURM_NTASKS" in composed.unset
    assert "SLURM_JOB_ID" not in composed.unset


def test_a_stale_allocation_does_not_count() -> None:
    composed = plan(JOB, nodes=9, allocated=False, notes=("job 12 is gone",))
    assert not [word for word in composed.processes[0].argv if word.startswith("--jobid")]
    assert "SLURM_JOB_ID" in composed.unset
    assert "job 12 is gone" in composed.notes


def test_an_uneven_allocation_is_named_node_by_node() -> None:
    environ = {**JOB, "SLURM_JOB_CPUS_PER_NODE": "7,1"}
    found = flags(environ, nodes=2, ntasks_per_node=2)
    assert found["--nodelist"] == "node01,node01,node02,node02"
    assert found["--distribution"] == "arbitrary"
    assert "--nodes" not in found, "24.11 refuses it beside arbitrary"
    assert "--nodelist" not in flags(JOB, nodes=2, ntasks_per_node=2)


WORD = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8)


@given(st.lists(WORD.filter(lambda word: word != ":"), max_size=6))
def test_case_8_5_arguments_are_words_of_their_own(arguments: list[str]) -> None:
    words = argv(command=("python", "train.py", *arguments))
    entry = ["/venv/bin/python", "-I", "-S", f"{RUN}/entrypoint.pyz", "--"]
    assert words[-len(arguments) - 7 :] == [*entry, "python", "train.py", *arguments]


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_case_8_5_a_lone_colon_is_in_no_word_of_its_own(launcher: str) -> None:
    command = ("python", "a b", ":", "", "it's")
    words = argv(command=command, launcher=launcher)
    assert ":" not in words
    assert words[-3:-1] == ["sh", "-c"]
    with pytest.raises(UsageError, match=":"):
        argv(srun_arg=(":",))


def test_a_nul_byte_is_refused() -> None:
    with pytest.raises(UsageError, match="NUL"):
        plan(srun_arg=("--comment=\0HOME\0",))


def test_outside_of_a_container_this_python_starts_all() -> None:
    words = argv(workload="sage", command=(), workload_args=("--epochs", "2"))
    assert words[words.index("-I") - 1] == "/venv/bin/python"
    assert words[-5:] == ["/venv/bin/python", f"{RUN}/lib/workloads", "sage", "--epochs", "2"]


def test_in_a_container_the_images_python_and_a_path_that_is_only_there() -> None:
    words = argv(workload="sage", command=(), container_image=IMAGE)
    entry = ["python3", "-I", "-S", "/toolkit-run/entrypoint.pyz", "--"]
    assert words[-8:] == [*entry, "python3", "/toolkit-run/lib/workloads", "sage"]
    assert plan(container_image=IMAGE).env["TOOLKIT_RUN_DIR"] == "/toolkit-run"


def test_a_container_without_a_job_id_is_named_after_the_run() -> None:
    assert flags(container_image=IMAGE, container_name="pyg")["--container-name"] == "pyg-train-1"
    in_job = flags(JOB, container_image=IMAGE, container_name="pyg")
    assert in_job["--container-name"] == "pyg-12", "the next step of the job finds it again"


def test_torchrun_is_one_task_a_node_with_the_cpus_of_its_ranks() -> None:
    found = flags(nodes=2, ntasks_per_node=4, cpus_per_task=3, launcher="torchrun")
    assert (found["--ntasks"], found["--ntasks-per-node"], found["--cpus-per-task"]) == (
        *("2", "1"),
        "12",
    )
    assert flags(ntasks_per_node=4, launcher="torchrun")["--cpus-per-task"] == "4"


def test_torchrun_is_the_commands_own() -> None:
    words = argv(command=("/opt/py/bin/python3.9", "x.py"), launcher="torchrun")
    assert words[words.index("-c") + 2] == "/opt/py/bin/python3.9"
    words = argv(command=("bash", "x.sh"), launcher="torchrun")
    assert words[words.index("-c") + 2] == "/venv/bin/python"
    assert words[-5:-2] == ["-S", f"{RUN}/entrypoint.pyz", "--"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1, "0-00:00:01"), (90, "0-00:01:30"), (43200, "0-12:00:00"), (172801, "2-00:00:01")],
)
def test_times_are_written_as_slurm_reads_them(seconds: int, text: str) -> None:
    assert slurm_time(seconds) == text


@pytest.mark.parametrize(
    ("name", "environ", "options"),
    [
        ("srun-plain", {}, {"nodes": 2, "ntasks_per_node": 2}),
        (
            "srun-container",
            {},
            {
                "nodes": 2,
                "ntasks_per_node": 2,
                "gpus_per_node": 2,
                "container_image": IMAGE,
                "container_mounts": (".:/workspace",),
                "command": ("python3", "distributed_sampling_multinode.py"),
            },
        ),
        (
            "srun-step",
            JOB,
            {"nodes": 2, "ntasks_per_node": 4, "env": (("NOTE", "it's $5; ok"),)},
        ),
        (
            "srun-torchrun",
            {},
            {"nodes": 2, "ntasks_per_node": 4, "gpus_per_node": 4, "launcher": "torchrun"},
        ),
    ],
)
def test_golden(name: str, environ: dict[str, str], options: dict[str, Any]) -> None:
    check_golden(f"{name}.sh", plan(environ, **options).script())
