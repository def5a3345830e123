"""The ``srun`` command of a job: a pure function from the job to argv.

Everything is said on every srun, because what one Slurm release inherits from a job around it,
another ignores: 22.05 reads SRUN_CPUS_PER_TASK where 24.11 reads SLURM_CPUS_PER_TASK, and a bare
``srun -c2`` starts as many tasks as fit.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from toolkit.entrypoint import run_files
from toolkit.errors import UsageError
from toolkit.options import Said, said
from toolkit.slurm import environment

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from toolkit.job import Job
    from toolkit.options import JobSpec

#: In a batch script: a NUL cannot be part of an argument, so this is how a word holds a variable.
JOB_ID = "\0SLURM_JOB_ID\0"

#: Short options of srun and sbatch that say what we say too, or move what we rely on.
_SHORT = {
    "N": "nodes",
    "n": "ntasks",
    "c": "cpus-per-task",
    "G": "gpus",
    "K": "kill-on-bad-exit",
    "J": "job-name",
    "p": "partition",
    "A": "account",
    "q": "qos",
    "t": "time",
    "C": "constraint",
    "D": "chdir",
    "o": "output",
    "e": "error",
    "i": "input",
    "a": "array",
    "d": "dependency",
}
#: Options that we do not give, and what each would do to the job.
_HARMFUL = {
    "tres-bind": "each rank may see a part of the node's GPUs only, as device 0",
    "gpus-per-task": "each rank may see one GPU only, as device 0; use toolkit's --gpus-per-task",
    "gpus": "GPUs may be spread unevenly over the nodes; use toolkit's --gpus-per-node",
    "ntasks-per-gpu": "it changes the number of ranks; use --ntasks-per-node",
    "ntasks-per-core": "it changes where ranks go; use --ntasks-per-node",
    "ntasks-per-socket": "it changes where ranks go; use --ntasks-per-node",
    "multi-prog": "srun takes the command for a configuration file",
    "pty": "only rank 0 is then connected",
    "output": "toolkit logs does not find what ranks print",
    "error": "toolkit logs does not find what ranks print",
    "chdir": "the command starts elsewhere; start toolkit in that directory instead",
    "wrap": "the script is not run",
}
#: What it does when the user's value replaces ours.
_CONSEQUENCES = {
    "gpu-bind": ": each rank may see a part of the node's GPUs only, as device 0",
    "kill-on-bad-exit": ": when one rank fails, the others wait for it until the time limit",
    "nodes": ": use toolkit's --nodes, which the rest of the line goes by",
    "ntasks": ": use toolkit's --ntasks, which the rest of the line goes by",
    "ntasks-per-node": ": use toolkit's --ntasks-per-node, which the rest of the line goes by",
    "output": ": toolkit logs does not find what ranks print",
    "error": ": toolkit logs does not find what ranks print",
}
_PYXIS_PAIRS = frozenset({"container-mount-home", "container-writable", "container-readonly"})
_PYXIS_OWN = frozenset({"container-workdir", "container-name", "container-env"})
#: Pairs of which pyxis takes one only.
_OPPOSITE = {
    "container-mount-home": "no-container-mount-home",
    "no-container-mount-home": "container-mount-home",
    "container-readonly": "container-writable",
}
_TRES = frozenset({"gres", "tres-per-task", "tres-per-node", "tres-per-job", "tres-per-socket"})


@dataclass(frozen=True)
class Srun:
    """An ``srun`` with its variables. ``notes`` is what the user should know."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    notes: tuple[str, ...]


def compose(job: Job, hosts: tuple[str, ...] = ()) -> Srun:
    """The srun of a job: one that makes a job, a step of the allocation, or a batch script's.

    Args:
        job: the job; in a batch script, its run directory and attempt are shell variables.
        hosts: the node of each rank, where srun must be told.

    Raises:
        UsageError: if an argument of the user's cannot be passed on.
    """
    spec = job.spec
    _no_nul(spec)
    env = job.variables()
    if job.batch:
        env["TOOLKIT_LOG"] = "1"
    flags = _resources(job)
    if hosts:
        flags.remove(f"--nodes={spec.nodes}")  # 24.11 refuses it beside arbitrary
        flags += ["--distribution=arbitrary", f"--nodelist={','.join(hosts)}"]
    flags.append("--label")
    notes: list[str] = []
    if job.container:
        from toolkit.slurm import container  # noqa: PLC0415 - milliseconds that others need not pay

        suffix = JOB_ID if job.batch else job.run_dir.name
        suffix = job.allocation.job_id if job.allocation else suffix
        made, notes = container.flags(job, environment.container_env(job), suffix)
        flags += _without(made, spec.srun_arg)
    elif any(name.startswith("container-") for name, _, _ in options(spec.srun_arg)):
        msg = "--srun-arg: a job in a container needs toolkit's own --container-image."
        raise UsageError(msg)
    notes += contradictions(spec.srun_arg, flags, "--srun-arg")
    argv = ("srun", *flags, *spec.srun_arg, *_entry(job))
    return Srun(argv, env, tuple(notes))


def shell(job: Job, *, terminal: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """An interactive task with the job's image and mounts, and notes; a step in an allocation.

    The job's nodes and tasks do not count. ``terminal`` tells whether there is one to connect.
    """
    from toolkit.slurm import container  # noqa: PLC0415 - as above

    spec = job.spec
    asked = sorted(dict(spec.env))
    suffix = job.allocation.job_id if job.allocation else "shell"
    mounted, notes = container.flags(job, asked, suffix, run_dir=False)
    flags = ["--nodes=1", "--ntasks=1"]
    flags += said(spec, Said.LIMIT) if job.allocation else said(spec, Said.JOB, Said.LIMIT)
    if spec.gpus_per_node is not None:
        flags.append(f"--gpus-per-node={spec.gpus_per_node}")
    if spec.cpus_per_task is not None:
        flags.append(f"--cpus-per-task={spec.cpus_per_task}")
    if terminal:
        flags.append("--pty")
    return ("srun", *flags, *mounted, *spec.srun_arg, *spec.command), tuple(notes)


def layout_flags(spec: JobSpec) -> list[str]:
    """Nodes, tasks, GPUs and CPUs, for srun and for the head of a batch script."""
    flags = said(spec, Said.LAYOUT)
    # Bound to one GPU each, ranks could not use peer memory, and all would call theirs device 0.
    if spec.gpus_per_node or any(
        name.startswith("gpus") or (name in _TRES and "gpu" in (value or ""))
        for name, value, _ in options((*spec.srun_arg, *spec.sbatch_arg))
    ):
        flags.append("--gpu-bind=none")
    return flags


def options(args: Iterable[str]) -> list[tuple[str, str | None, str]]:
    """``(long name, value, as written)`` of each option in arguments for srun or sbatch."""
    found: list[tuple[str, str | None, str]] = []
    words = list(args)
    for number, word in enumerate(words):
        following = words[number + 1] if number + 1 < len(words) else ""
        value: str | None = following if following and not following.startswith("-") else None
        if word.startswith("--"):
            name, equals, given = word[2:].partition("=")
            found.append((name, given if equals else value, word))
        elif len(word) > 1 and word[0] == "-":
            name = _SHORT.get(word[1], word[1])
            found.append((name, word[2:].lstrip() or value, word))
    return found


def contradictions(args: Iterable[str], ours: Iterable[str], source: str) -> list[str]:
    """Notes about arguments of the user's that contradict what the toolkit says; they win.

    Args:
        args: the user's arguments.
        ours: the flags that stand before them.
        source: the option that they came from.
    """
    said = {name: (value, word) for name, value, word in options(ours)}
    notes = []
    for name, value, word in options(args):
        if name in _HARMFUL and name not in said:
            notes.append(f"{source} {word}: {_HARMFUL[name]}")
        elif name == "export":
            if "ALL" not in (value or "").split(","):
                notes.append(f"{source} {word}: without ALL the ranks lose PATH, HOME and --env")
        elif name in said and (value or "1") != (said[name][0] or "1"):
            notes.append(f"{source} {word} replaces {said[name][1]}{_CONSEQUENCES.get(name, '')}")
        elif name == "gres" and "gpus-per-node" in said:
            notes.append(f"{source} {word}: beside {said['gpus-per-node'][1]}; leave one out")
        elif name.removeprefix("no-") in _PYXIS_PAIRS or name in _PYXIS_OWN:
            notes.append(f"{source} {word} replaces what toolkit's own options say")
    return notes


def carried(command: tuple[str, ...]) -> tuple[str, ...]:
    """``command`` as srun delivers it unchanged.

    srun takes a word that is exactly ``:`` for the start of another component, even after ``--``;
    only then the command travels as one quoted string.
    """
    return ("sh", "-c", f"exec {shlex.join(command)}") if ":" in command else command


def _resources(job: Job) -> list[str]:
    flags = [f"--jobid={job.allocation.job_id}", "--overlap"] if job.allocation else []
    flags += layout_flags(job.spec)
    if not job.batch:
        places = (Said.LIMIT,) if job.allocation else (Said.JOB, Said.LIMIT)
        flags += said(job.spec, *places)
    return [*flags, "--kill-on-bad-exit=1", "--export=ALL", "--input=none"]


def _no_nul(spec: JobSpec) -> None:
    """Raise UsageError for a NUL byte, which toolkit.toml can hold and no argument can."""
    for key, value in vars(spec).items():
        if any("\0" in str(item) for item in (value if isinstance(value, tuple) else (value,))):
            msg = f"{key} of the job holds a NUL byte, which no argument and no variable can."
            raise UsageError(msg)


def _without(flags: Iterable[str], args: tuple[str, ...]) -> list[str]:
    """Our pyxis flags less those that the user gives: pyxis refuses most when they come twice.

    Raises:
        UsageError: for a flag that must be toolkit's own.
    """
    given = {name for name, _, _ in options(args)}
    for name in ("container-image", "container-mounts"):
        if name in given:
            msg = f"--srun-arg --{name}: give it as toolkit's own --{name}; srun keeps the last one"
            raise UsageError(f"{msg} only, and the run directory has to be mounted too.")
    replaced = given | {_OPPOSITE[name] for name in given & set(_OPPOSITE)}
    return [flag for flag in flags if flag[2:].partition("=")[0] not in replaced]


def _entry(job: Job) -> tuple[str, ...]:
    """What each task starts: the entrypoint, and behind it the command or a torchrun of it."""
    if ":" in job.spec.srun_arg:
        msg = "--srun-arg ':' would start another component of the job. Leave it out."
        raise UsageError(msg)
    if job.spec.task == run_files.NODE:
        command = (*_torchrun(job), *job.entrypoint, "--", *job.command)
        return (*job.entrypoint, "--agent", str(job.spec.ntasks_per_node), "--", *carried(command))
    return (*job.entrypoint, "--", *carried(job.command))


def _torchrun(job: Job) -> tuple[str, ...]:
    """One torchrun a node, at the address that the entrypoint found, in Slurm's order of nodes.

    It is that of the Python which the command names, and starts each rank through the entrypoint.
    """
    program = job.command[0]
    python = program if PurePath(program).name.startswith("python") else job.python
    launch = (
        'exec "$0" -m torch.distributed.run'
        f" --nnodes={job.spec.nodes} --nproc-per-node={job.spec.ntasks_per_node}"
        ' --node-rank="$NODE_RANK"'
        ' --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" --no-python "$@"'
    )
    return ("sh", "-c", launch, python)
