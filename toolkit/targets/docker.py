"""The ``docker`` target: each node a container with a host name of its own, on one network.

A rehearsal of a job of several nodes on a workstation, with the image as it will run on the
cluster: not as root, the root read-only, the current folder at /workspace and the run directory
where pyxis mounts it. The ranks find each other by the nodes' names, as they do there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

from toolkit import run_dir as run_dirs
from toolkit.errors import UnavailableError, UsageError
from toolkit.job import Plan, Process
from toolkit.slurm import container, environment
from toolkit.targets import local

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from toolkit.job import JobSpec, Outcome
    from toolkit.run_dir import RunDir
    from toolkit.targets import View

NAME = "docker"
COMMAND_LIMIT_S = 60
PULL_LIMIT_S = 3600


def plan(
    spec: JobSpec,
    path: Path,
    *,
    cwd: Path,
    environ: Mapping[str, str],
    record: Mapping[str, object],
) -> Plan:
    """What will be executed on this machine, as it is now."""
    machine = local.probe(environ)
    return compose(spec, path, cwd=cwd, environ=environ, record=record, machine=machine)


def compose(
    spec: JobSpec,
    path: Path,
    *,
    cwd: Path,
    environ: Mapping[str, str],
    record: Mapping[str, object],
    machine: local.Machine,
) -> Plan:
    """The plan for a given machine: a network, a container a node, and a process a rank in them.

    Arguments and errors are those of :func:`toolkit.targets.local.compose`; an image is needed.
    """
    from toolkit.image import reference  # noqa: PLC0415 - only containers have one

    environment.require(spec, environ)
    if spec.container_image is None:
        raise UsageError("--on docker: needs --image, the image to start the nodes from.")
    image = reference.parse(spec.container_image)
    if image.is_file:
        msg = f"--image {spec.container_image}: is a squashfs file, which Docker cannot start."
        raise UsageError(msg)
    mounts, notes = container.mounts(spec, cwd, environ, os.path.exists)
    gpus, note = local.divide_gpus(machine.gpus, spec)
    env = {
        "TOOLKIT_TARGET": NAME,
        "TOOLKIT_RUN_DIR": environment.RUN_DIR,
        **local.step(spec, machine),
        "PYTHONUNBUFFERED": "1",
        **({"TOOLKIT_EXPECTED_BUILD": spec.container_build} if spec.container_build else {}),
        **dict(spec.env),
    }
    if spec.rendezvous == "file":
        env["TOOLKIT_INIT_METHOD"] = f"file://{environment.RUN_DIR}/rendezvous"
    names = [f"{path.name}-node{node}" for node in range(spec.nodes)]
    volumes = [*map(str, mounts), f"{path}:{environment.RUN_DIR}"]
    workdir = spec.container_workdir or container.workdir(spec, cwd, mounts)
    node_flags = (
        f"--network={path.name}",
        f"--user={os.getuid()}:{os.getgid()}",
        *([] if spec.container_writable else ["--read-only"]),
        "--tmpfs=/tmp:mode=1777",
        "--shm-size=1g",  # what DataLoader workers pass batches through; 64 MB by default
        *(f"--volume={volume}" for volume in volumes),
        *([f"--workdir={workdir}"] if workdir else []),
        "--entrypoint=sleep",
    )
    start: list[tuple[str, ...]] = [("docker", "network", "create", path.name)]
    for node, name in enumerate(names):
        share = [f'--gpus="device={gpus[node]}"'] if gpus and gpus[node] else []
        flags = (f"--name={name}", f"--hostname=node{node}", f"--network-alias=node{node}")
        end = (image.docker(), "infinity")
        start.append(("docker", "run", "--detach", "--init", *flags, *share, *node_flags, *end))
    # Names only: the values are in docker's own environment, and so on no command line.
    passed = [*env, *spec.env_names, *local.RANK_VARIABLES]
    given = tuple(f"--env={name}" for name in passed)
    processes = tuple(
        Process(
            argv=("docker", "exec", *given, name, *local.rank_argv(spec, _SEEN, "python3")),
            env=local.rank_variables(spec, rank),
            label=f"rank {rank}",
            log=run_dirs.log_name(rank),
        )
        for rank, name in enumerate(name for name in names for _ in range(spec.ntasks_per_node))
    )
    ignored = [
        f"{option} has no effect in Docker"
        for option, value in (("--srun-arg", spec.srun_args), ("--launcher", _torchrun(spec)))
        if value
    ]
    return Plan(
        title=f"toolkit run: {spec.nodes} containers of {spec.ntasks_per_node} ranks",
        run_dir=path,
        cwd=cwd,
        stage=run_dirs.stage_command(path, record, workload=spec.workload is not None),
        before=tuple(start),
        processes=processes,
        after=(("docker", "rm", "--force", *names), ("docker", "network", "rm", path.name)),
        env=env,
        unset=environment.outer(environ, spec),
        notes=tuple(filter(None, [note, *notes, *ignored])),
    )


def _torchrun(spec: JobSpec) -> bool:
    return spec.launcher == "torchrun"


_SEEN = environment.RUN_DIR  # the run directory as the ranks see it


def check(spec: JobSpec) -> None:  # noqa: ARG001 - every target's check has it
    """Raise UnavailableError where no engine answers or docker's command is missing."""
    from toolkit.image import engine  # noqa: PLC0415 - brings the SDK

    if shutil.which("docker") is None:
        msg = "--on docker: the docker command is not on PATH. Install Docker's CLI."
        raise UnavailableError(msg)
    engine.connect(None, os.environ)


def run(spec: JobSpec, plan: Plan, run: RunDir, view: View, environ: Mapping[str, str]) -> Outcome:
    """Start the nodes, run the ranks in them, and remove the nodes, however it ends.

    Raises:
        UnavailableError: if a node's container cannot be started.
    """
    env = plan.environment(Process(()), environ)
    try:
        for command in plan.before:
            _docker(command, env, PULL_LIMIT_S)
        return local.run(spec, plan, run, view, environ)
    finally:
        for command in plan.after:
            subprocess.run(
                command, env=env, capture_output=True, timeout=COMMAND_LIMIT_S, check=False
            )


def _docker(command: tuple[str, ...], env: Mapping[str, str], limit: float) -> None:
    try:
        ran = subprocess.run(
            command, env=dict(env), capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"docker {command[1]}: no answer within {limit:.0f} s") from None
    if ran.returncode != 0:
        said = "; ".join(ran.stderr.strip().splitlines())
        raise UnavailableError(f"docker {command[1]} failed: {said}")
