"""The ``docker`` target: each node a container with a host name of its own, on one network.

A rehearsal of a job of several nodes on a workstation, with the image as it will run on the
cluster: not as root, the root read-only, the current folder at /workspace and the run directory
where pyxis mounts it. The ranks find each other by the nodes' names, as they do there.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

from toolkit import run_dir as run_dirs
from toolkit.common.capture import capture
from toolkit.entrypoint import run_files
from toolkit.errors import UnavailableError, UsageError
from toolkit.plan import Plan, Process
from toolkit.targets import local

if TYPE_CHECKING:
    import signal
    from collections.abc import Mapping

    from toolkit.job import Job
    from toolkit.plan import Outcome
    from toolkit.run_dir import RunDir
    from toolkit.targets import Note

COMMAND_LIMIT_S = 60
PULL_LIMIT_S = 3600
TELL_LIMIT_S = 10


def plan(job: Job, machine: local.Machine | None = None) -> Plan:
    """A network, a container a node, and a process a rank in them; an image is needed.

    Raises:
        UsageError: if there is no image that Docker can start.
    """
    machine = machine or local.probe(job.environ)
    spec, container = job.spec, job.container
    if container is None:
        raise UsageError("--on docker: needs --image, the image to start the nodes from.")
    image = container.image
    if image.is_file:
        msg = f"--image {spec.container_image}: is a squashfs file, which Docker cannot start."
        raise UsageError(msg)
    gpus, note = local.divide_gpus(machine.gpus, spec)
    env = {**job.variables(), **local.step(spec, machine), **spec.env_values}
    network = job.run_dir.name
    names = [f"{network}-node{node}" for node in range(spec.nodes)]
    volumes = [*map(str, container.mounts), f"{job.run_dir}:{job.seen_run_dir}"]
    node_flags = (
        f"--network={network}",
        f"--user={os.getuid()}:{os.getgid()}",
        *([] if spec.container_writable else ["--read-only"]),
        "--tmpfs=/tmp:mode=1777",
        "--shm-size=1g",  # what DataLoader workers pass batches through; 64 MB by default
        *(f"--volume={volume}" for volume in volumes),
        *([f"--workdir={container.workdir}"] if container.workdir else []),
        "--entrypoint=sleep",
    )
    start: list[tuple[str, ...]] = [("docker", "network", "create", network)]
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
            argv=("docker", "exec", *given, name, *job.entrypoint, "--", *job.command),
            env=local.rank_variables(spec, rank),
            label=f"rank {rank}",
            log=run_files.log(rank),
        )
        for rank, name in enumerate(name for name in names for _ in range(spec.ntasks_per_node))
    )
    ignored = local.without_effect(spec, ("srun_arg", "launcher"), "in Docker")
    return Plan(
        title=f"toolkit run: {spec.nodes} containers of {spec.ntasks_per_node} ranks",
        run_dir=job.run_dir,
        cwd=job.cwd,
        stage=run_dirs.stage_command(job.run_dir, job.record, workload=job.workload),
        before=tuple(start),
        processes=processes,
        after=(("docker", "rm", "--force", *names), ("docker", "network", "rm", network)),
        env=env,
        unset=job.unset,
        notes=tuple(filter(None, [note, *job.notes, *ignored])),
    )


def check(job: Job) -> None:
    """Raise UnavailableError where no engine answers or docker's command is missing."""
    from toolkit.image import engine  # noqa: PLC0415 - brings the SDK

    if shutil.which("docker", path=job.environ.get("PATH")) is None:
        msg = "--on docker: the docker command is not on PATH. Install Docker's CLI."
        raise UnavailableError(msg)
    with engine.connect(None, job.environ):
        pass


def run(job: Job, plan: Plan, run: RunDir, note: Note) -> Outcome:
    """Start the nodes, run the ranks in them, and remove the nodes, however it ends.

    Raises:
        UnavailableError: if a node's container cannot be started.
    """
    env = plan.environment(Process(()), job.environ)

    def tell(ranks: Mapping[int, object], number: signal.Signals) -> None:
        """Signal the ranks in their containers: docker passes no signal on to what it executes."""
        for rank in ranks:
            record = run.rank_record(rank)
            if record is not None:
                node = f"{job.run_dir.name}-node{rank // job.spec.ntasks_per_node}"
                inside = ("docker", "exec", node, "python3", "-c", _SIGNAL)
                capture((*inside, str(int(number)), str(record["pid"])), TELL_LIMIT_S, env)

    try:
        for command in plan.before:
            asked = capture(command, PULL_LIMIT_S, env)
            if not asked.ok:
                raise UnavailableError(f"docker {command[1]} failed: {asked.said()}")
        return local.run(job, plan, run, note, tell)
    finally:
        for command in plan.after:
            capture(command, COMMAND_LIMIT_S, env)


def is_up(run: RunDir, environ: Mapping[str, str]) -> bool:
    """Whether containers of a run are there."""
    return bool(_containers(run, environ))


def remove(run: RunDir, environ: Mapping[str, str]) -> None:
    """Remove the containers of a run and its network, whoever started them."""
    for command in (
        ("docker", "rm", "--force", *_containers(run, environ)),
        ("docker", "network", "rm", run.path.name),
    ):
        capture(command, COMMAND_LIMIT_S, environ)


def _containers(run: RunDir, environ: Mapping[str, str]) -> list[str]:
    listing = ("docker", "ps", "--all", "--quiet", "--no-trunc")
    asked = capture((*listing, f"--filter=network={run.path.name}"), COMMAND_LIMIT_S, environ)
    return asked.stdout.split() if asked.ok else []


#: A rank leads a session of its own.
_SIGNAL = "import os, sys; os.killpg(int(sys.argv[2]), int(sys.argv[1]))"
