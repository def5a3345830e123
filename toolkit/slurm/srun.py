"""The ``srun`` command of a job: a pure function from JobSpec to argv.

Everything is said on every srun, because what one Slurm release inherits from a job around it,
another ignores: 22.05 reads SRUN_CPUS_PER_TASK where 24.11 reads SLURM_CPUS_PER_TASK, and a bare
``srun -c2`` starts as many tasks as fit.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Literal

from toolkit import run_dir as run_dirs
from toolkit.errors import UsageError
from toolkit.slurm import environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from toolkit.job import JobSpec

#: What srun is: a job of its own, a step in the allocation we are in, or a line of a batch script.
Kind = Literal["job", "step", "batch"]

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
_LOGS = "logs/{}-%t.log"  # run_dir.log_name() in Slurm's words
_TRES = frozenset({"gres", "tres-per-task", "tres-per-node", "tres-per-job", "tres-per-socket"})


@dataclass(frozen=True)
class Srun:
    """An ``srun`` with its variables. ``notes`` is what the user should know."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    notes: tuple[str, ...]


def compose(
    spec: JobSpec,
    run_dir: str,
    *,
    kind: Kind,
    cwd: Path,
    environ: Mapping[str, str],
    python: str,
    job_id: str = "",
    hosts: tuple[str, ...] = (),
    fresh: str = "",
    exists: Callable[[str], bool] = os.path.exists,
) -> Srun:
    """The step that runs ``spec``.

    Args:
        spec: the job.
        run_dir: the run directory on the host.
        kind: where the srun stands.
        cwd: the current directory.
        environ: the caller's environment.
        python: the interpreter outside of a container; it must be where all nodes see it.
        job_id: the job around it; for ``kind="job"`` there is none yet.
        hosts: the node of each rank, where srun must be told.
        fresh: ends the name of the rendezvous file.
        exists: whether a path is on this machine.

    Raises:
        UsageError: if an argument of the user's cannot be passed on.
    """
    _no_nul(spec)
    inside = spec.container_image is not None
    seen = environment.RUN_DIR if inside else run_dir
    env = environment.variables(spec, seen, fresh)
    flags = _resources(spec, kind, job_id)
    if hosts:
        flags.remove(f"--nodes={spec.nodes}")  # 24.11 refuses it beside arbitrary
        flags += ["--distribution=arbitrary", f"--nodelist={','.join(hosts)}"]
    if kind == "batch":
        flags += ["--open-mode=truncate", f"--output={run_dir}/{_LOGS.format(spec.task_is)}"]
    else:
        flags.append("--label")
    notes: list[str] = []
    if inside:
        unset = environment.outer(environ, spec, step=kind == "step")
        from toolkit.slurm import container  # noqa: PLC0415 - milliseconds that others need not pay

        made = container.compose(
            spec,
            run_dir,
            cwd=cwd,
            environ=environ,
            variables=environment.container_env(spec, env, environ, unset),
            suffix=job_id or PurePath(run_dir).name,
            exists=exists,
        )
        flags += _without(made.flags, spec.srun_args)
        notes += made.notes
    elif any(name.startswith("container-") for name, _, _ in options(spec.srun_args)):
        msg = "--srun-arg: a job in a container needs toolkit's own --container-image."
        raise UsageError(msg)
    notes += contradictions(spec.srun_args, flags, "--srun-arg")
    argv = ("srun", *flags, *spec.srun_args, *_entry(spec, seen, "python3" if inside else python))
    return Srun(argv, env, tuple(notes))


def tasks_per_node(spec: JobSpec) -> int:
    """Slurm's tasks on a node: a rank each, or one torchrun that starts the ranks."""
    return 1 if spec.launcher == "torchrun" else spec.ntasks_per_node


def cpus_per_task(spec: JobSpec) -> int | None:
    """CPUs of each of Slurm's tasks; a torchrun's has those of all its ranks, one at least."""
    if spec.launcher == "torchrun":
        return (spec.cpus_per_task or 1) * spec.ntasks_per_node
    return spec.cpus_per_task


def layout_flags(spec: JobSpec, user: Iterable[str] = ()) -> list[str]:
    """Nodes, tasks, GPUs and CPUs, for srun and for the head of a batch script.

    ``user`` are the user's own arguments, which may ask for GPUs too.
    """
    tasks = tasks_per_node(spec)
    cpus = cpus_per_task(spec)
    flags = [
        f"--nodes={spec.nodes}",
        f"--ntasks={spec.nodes * tasks}",
        f"--ntasks-per-node={tasks}",
    ]
    if spec.gpus_per_node is not None:
        flags.append(f"--gpus-per-node={spec.gpus_per_node}")
    if cpus is not None:
        flags.append(f"--cpus-per-task={cpus}")
    # Bound to one GPU each, ranks could not use peer memory, and all would call theirs device 0.
    if spec.gpus_per_node or any(
        name.startswith("gpus") or (name in _TRES and "gpu" in (value or ""))
        for name, value, _ in options(user)
    ):
        flags.append("--gpu-bind=none")
    return flags


def job_flags(spec: JobSpec) -> list[str]:
    """What a job asks for and a step in one cannot: a step with --constraint waits for ever."""
    wanted = {
        "partition": spec.partition,
        "account": spec.account,
        "qos": spec.qos,
        "constraint": spec.constraint,
    }
    return [f"--{name}={value}" for name, value in wanted.items() if value]


def limit_flags(spec: JobSpec) -> list[str]:
    """Memory, time and name, which jobs and steps have."""
    time = slurm_time(spec.time) if spec.time else None
    wanted = {"mem": spec.mem, "time": time, "job-name": spec.job_name}
    return [f"--{name}={value}" for name, value in wanted.items() if value]


def slurm_time(seconds: int) -> str:
    """A time limit in Slurm's form, ``D-HH:MM:SS``."""
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}-{hour:02}:{minute:02}:{second:02}"


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


def _resources(spec: JobSpec, kind: Kind, job_id: str) -> list[str]:
    flags = [f"--jobid={job_id}", "--overlap"] if kind == "step" else []
    flags += layout_flags(spec, (*spec.srun_args, *spec.sbatch_args))
    if kind == "job":
        flags += job_flags(spec)
    if kind != "batch":
        flags += limit_flags(spec)
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


def _entry(spec: JobSpec, seen: str, python: str) -> tuple[str, ...]:
    """What each task starts: the entrypoint, and behind it the command or a torchrun of it."""
    if ":" in spec.srun_args:
        msg = "--srun-arg ':' would start another component of the job. Leave it out."
        raise UsageError(msg)
    command = spec.command
    if spec.workload is not None:
        command = (python, f"{seen}/{run_dirs.WORKLOADS}", spec.workload, *spec.workload_args)
    entry = (python, "-I", "-S", f"{seen}/{run_dirs.ENTRYPOINT}")
    if spec.launcher == "torchrun":
        command = (*_torchrun(spec, command, python), *entry, "--", *command)
        return (*entry, "--agent", str(spec.ntasks_per_node), "--", *carried(command))
    return (*entry, "--", *carried(command))


def _torchrun(spec: JobSpec, command: tuple[str, ...], python: str) -> tuple[str, ...]:
    """One torchrun a node, at the address that the entrypoint found, in Slurm's order of nodes.

    It is that of the Python which the command names, and starts each rank through the entrypoint.
    """
    if PurePath(command[0]).name.startswith("python"):
        python = command[0]
    launch = (
        'exec "$0" -m torch.distributed.run'
        f" --nnodes={spec.nodes} --nproc-per-node={spec.ntasks_per_node}"
        ' --node-rank="$NODE_RANK"'
        ' --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" --no-python "$@"'
    )
    return ("sh", "-c", launch, python)
