"""The ``srun`` of an interactive shell in a container."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from toolkit.slurm import container, environment, srun

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from toolkit.job import JobSpec


@dataclass(frozen=True)
class Shell:
    """The command, the variables that must not reach it, and what the user should know."""

    argv: tuple[str, ...]
    unset: tuple[str, ...]
    notes: tuple[str, ...]


def compose(spec: JobSpec, *, cwd: Path, environ: Mapping[str, str], terminal: bool) -> Shell:
    """One task with the job's image and mounts; a step where we are in an allocation.

    Args:
        spec: the job, which has an image; its nodes and tasks do not count.
        cwd: the current directory.
        environ: the caller's environment.
        terminal: whether there is one to connect.

    Raises:
        UsageError: if a mount, the workdir or the image cannot be what was given.
    """
    environment.require(spec, environ)
    job = environment.allocation(environ)
    unset = environment.outer(environ, spec, step=job is not None)
    names = environment.login_node(spec)
    prefixes = tuple(name for name in names if name.endswith("_"))
    unset += tuple(n for n in environ if n in names or (prefixes and n.startswith(prefixes)))
    made = container.compose(
        spec,
        None,
        cwd=cwd,
        environ=environ,
        variables=sorted(environment.asked_for(spec)),
        suffix=job.job_id if job else "shell",
    )
    flags = ["--nodes=1", "--ntasks=1", *([] if job else srun.job_flags(spec))]
    flags += srun.limit_flags(spec)
    if spec.gpus_per_node is not None:
        flags.append(f"--gpus-per-node={spec.gpus_per_node}")
    if spec.cpus_per_task is not None:
        flags.append(f"--cpus-per-task={spec.cpus_per_task}")
    if terminal:
        flags.append("--pty")
    argv = ("srun", *flags, *made.flags, *spec.srun_args, *spec.command)
    return Shell(argv, unset, made.notes)
