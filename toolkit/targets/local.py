"""The ``local`` target: N nodes of M tasks as processes on this machine.

Each process gets the variables that a Slurm step would give it and is started through the same
``entrypoint.pyz``, so that what resolves its rank here is what resolves it on a cluster.
``TOOLKIT_TARGET=local`` tells the entrypoint that these "nodes" share one loopback.
"""

from __future__ import annotations

import os
import platform
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit import run_dir as run_dirs
from toolkit.common.capture import capture
from toolkit.common.process import Signals, exit_code, signal_group, start
from toolkit.entrypoint import codes, finish, run_files
from toolkit.errors import UnavailableError
from toolkit.options import JobSpec
from toolkit.plan import Outcome, Plan, Process

if TYPE_CHECKING:
    from collections.abc import Iterable

    from toolkit.entrypoint.finish import Json
    from toolkit.job import Job
    from toolkit.run_dir import RunDir
    from toolkit.targets import Note

#: The other ranks of a failed one, and those that do not listen to SIGTERM, get so long to end.
GRACE_S = 2.0

_PORTS = range(10_000, 32_768)  # below Linux's ephemeral ports


@dataclass(frozen=True)
class Machine:
    """What this machine has, and who we are on it."""

    hostname: str
    cpus: int
    gpus: tuple[str, ...]  #: as CUDA_VISIBLE_DEVICES names them
    job_id: int
    port: int


def probe(environ: Mapping[str, str]) -> Machine:
    """Look at this machine: CPUs we may use, visible GPUs, a free port."""
    listing = capture(["nvidia-smi", "-L"], 30).stdout
    return Machine(
        hostname=platform.node(),
        cpus=len(os.sched_getaffinity(0)),
        gpus=visible_gpus(environ.get("CUDA_VISIBLE_DEVICES"), listing),
        job_id=os.getpid(),
        port=_free_port(os.getpid()),
    )


def visible_gpus(cuda_visible_devices: str | None, listing: str) -> tuple[str, ...]:
    """The GPUs that a process here may use, as CUDA_VISIBLE_DEVICES names them.

    Args:
        cuda_visible_devices: the variable; names (``GPU-8932f9``, ``MIG-…``) stay as they are.
        listing: what ``nvidia-smi -L`` prints: one line ``GPU 0: …`` a device.
    """
    installed = [line for line in listing.splitlines() if line.startswith("GPU ")]
    if not installed:
        return ()
    if cuda_visible_devices is None:
        return tuple(str(index) for index in range(len(installed)))
    return tuple(name for word in cuda_visible_devices.split(",") if (name := word.strip()))


def divide_gpus(gpus: tuple[str, ...], spec: JobSpec) -> tuple[list[str] | None, str | None]:
    """Each node's CUDA_VISIBLE_DEVICES, and a note where that is not what the user may expect.

    None leaves the variable alone (there is no GPU here). With fewer GPUs than ranks the ranks
    train on CPUs: a GPU shared by two ranks is slower than one alone and NCCL refuses it.
    """
    if spec.gpus_per_node == 0:
        return [""] * spec.nodes, None
    if not gpus:
        note = "no GPU is visible here: ranks use gloo on CPUs" if spec.gpus_per_node else None
        return None, note
    wanted = max(spec.gpus_per_node or 0, spec.ntasks_per_node)
    if len(gpus) < wanted * spec.nodes:
        note = (
            f"{len(gpus)} visible GPUs are fewer than the {wanted * spec.nodes} that"
            f" {spec.world_size} ranks need: ranks use gloo on CPUs"
        )
        return [""] * spec.nodes, note
    share = spec.gpus_per_node or len(gpus) // spec.nodes
    return [",".join(gpus[node * share : (node + 1) * share]) for node in range(spec.nodes)], None


def plan(job: Job, machine: Machine | None = None) -> Plan:
    """One process a rank on this machine, as it is now, or as ``machine`` says."""
    machine = machine or probe(job.environ)
    spec = job.spec
    given = {*job.environ} - {*job.unset}
    env = {**job.variables(), **step(spec, machine)}
    if "MASTER_PORT" not in given:
        env["MASTER_PORT"] = str(machine.port)
    if "GLOO_SOCKET_IFNAME" not in job.environ and sys.platform == "linux":
        env["GLOO_SOCKET_IFNAME"] = "lo"  # a laptop's own host name often resolves to nowhere
    gpus, note = divide_gpus(machine.gpus, spec)
    processes = []
    for rank in range(spec.world_size):
        variables = rank_variables(spec, rank)
        if gpus is not None:
            variables["CUDA_VISIBLE_DEVICES"] = gpus[int(variables["SLURM_NODEID"])]
        argv = (*job.entrypoint, "--", *job.command)
        processes.append(Process(argv, variables, f"rank {rank}", run_files.log(rank)))
    without = ("container_image", "container_mounts", "srun_arg", "launcher")
    return Plan(
        title=f"toolkit run: {spec.nodes} x {spec.ntasks_per_node} ranks on this machine",
        run_dir=job.run_dir,
        cwd=job.cwd,
        stage=run_dirs.stage_command(job.run_dir, job.record, workload=job.workload),
        processes=tuple(processes),
        env={**env, **spec.env_values},
        unset=job.unset,
        notes=tuple(
            filter(None, [note, *job.notes, *without_effect(spec, without, "on this machine")])
        ),
    )


def without_effect(spec: JobSpec, keys: Iterable[str], where: str) -> list[str]:
    """Notes about options that were given and count for nothing here."""
    default = JobSpec()
    notes = []
    for key in keys:
        value = getattr(spec, key)
        if value != getattr(default, key):
            shown = f" {value}" if key == "launcher" else ""
            notes.append(f"--{key.replace('_', '-')}{shown} has no effect {where}")
    return notes


def step(spec: JobSpec, machine: Machine) -> dict[str, str]:
    """The variables of a Slurm step that all its ranks have alike."""
    cpus_per_task = spec.cpus_per_task or max(1, machine.cpus // spec.world_size)
    several = spec.nodes > 1
    nodes = f"node[0-{spec.nodes - 1}]" if several else "node0"
    layout = f"{spec.ntasks_per_node}(x{spec.nodes})" if several else f"{spec.ntasks_per_node}"
    variables = {
        "SLURM_JOB_ID": machine.job_id,
        "SLURM_JOB_NAME": spec.job_name,
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_JOB_NUM_NODES": spec.nodes,
        "SLURM_NNODES": spec.nodes,
        "SLURM_NODELIST": nodes,
        "SLURM_NTASKS": spec.world_size,
        "SLURM_NTASKS_PER_NODE": spec.ntasks_per_node,
        "SLURM_TASKS_PER_NODE": layout,
        "SLURM_CPUS_PER_TASK": cpus_per_task,
        "SLURM_CPUS_ON_NODE": cpus_per_task * spec.ntasks_per_node,
        "SLURM_STEP_ID": 0,
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_NUM_NODES": spec.nodes,
        "SLURM_STEP_NUM_TASKS": spec.world_size,
        "SLURM_STEP_TASKS_PER_NODE": layout,
    }
    return {name: str(value) for name, value in variables.items()}


#: What differs from rank to rank.
RANK_VARIABLES = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURMD_NODENAME")


def rank_variables(spec: JobSpec, rank: int) -> dict[str, str]:
    """The variables of a Slurm step that tell a rank from the others."""
    node, local_rank = divmod(rank, spec.ntasks_per_node)
    values = (str(rank), str(local_rank), str(node), f"node{node}")
    return dict(zip(RANK_VARIABLES, values, strict=True))


def check(job: Job) -> None:
    """Raise UnavailableError where this Python cannot run the job."""
    from importlib.util import find_spec  # noqa: PLC0415 - two milliseconds that --dry-run need not pay

    workload = job.spec.workload
    if workload is None:
        return
    needed = ("torch", "torch_geometric") if workload == "sage" else ("torch",)
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        msg = (
            f"The workload {workload!r} needs {' and '.join(missing)}, which"
            f" {job.host_python} does not have. Install them:"
            " pip install -c constraints.txt 'pyg-slurm-toolkit[workloads]'"
        )
        raise UnavailableError(msg)


class _Rank:
    """A started rank: its process, which prints into its log by itself."""

    def __init__(self, number: int, process: subprocess.Popen[bytes]) -> None:
        self.number = number
        self.process = process


#: Sends a signal to ranks, by number.
Tell = Callable[[Mapping[int, subprocess.Popen[bytes]], signal.Signals], None]


def signal_processes(ranks: Mapping[int, subprocess.Popen[bytes]], number: signal.Signals) -> None:
    """Signal ranks of this machine, and whatever they started."""
    for process in ranks.values():
        signal_group(process, number)


def run(
    job: Job,
    plan: Plan,
    run: RunDir,
    note: Note,
    tell: Tell = signal_processes,
) -> Outcome:
    """Start every rank and watch them; end all within seconds when one fails.

    A time limit ends the run with 124, SIGINT and SIGTERM with 130; then the ranks get
    ``--grace`` to save what they have. A second signal ends them at once.

    Args:
        job: the job.
        plan: what to start.
        run: where the ranks' logs go.
        note: unused; every target has it.
        tell: how ranks are told to end, where these processes only stand for them.
    """
    del note
    begun = time.time()
    ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    ranks: list[_Rank] = []
    failure: Json | None = None
    with Signals() as signals:
        try:
            for number, process in enumerate(plan.processes):
                env = plan.environment(process, job.environ)
                with run.log(number).open("ab") as log:
                    started = start(process.argv, env, plan.cwd, log)
                ranks.append(_Rank(number, started))
                threading.Thread(target=_report, args=(ranks[-1], ended), daemon=True).start()
            limit = job.spec.time
            deadline = time.monotonic() + limit if limit else None
            running = len(ranks)
            while running and failure is None:
                failure = _interrupted(signals, deadline, limit)
                try:
                    rank, code = ended.get(timeout=0.1)
                except queue.Empty:
                    continue
                running -= 1
                if code and failure is None:
                    failure = _failed(rank, code, run)
        finally:
            # A rank that has failed takes the others along; who ends the run lets them save.
            asked = failure is not None and failure["rank"] is None
            grace = float(job.spec.grace) if asked else GRACE_S
            _end(ranks, grace, signals, tell)
    return Outcome(
        exit_code=failure["exit_code"] if failure else 0,
        started=begun,
        ended=time.time(),
        hosts=tuple(finish.hosts(finish.rank_records(str(run.path))))
        or (platform.node(),) * job.spec.nodes,
        failure=failure,
    )


def _report(rank: _Rank, ended: queue.SimpleQueue[tuple[int, int]]) -> None:
    ended.put((rank.number, exit_code(rank.process)))


def _interrupted(signals: Signals, deadline: float | None, limit: int | None) -> Json | None:
    if signals.caught is not None:
        return finish.failure("toolkit", f"was cancelled by {signals.caught.name}", codes.CANCELLED)
    if deadline is not None and time.monotonic() > deadline:
        return finish.failure("toolkit", f"reached its time limit of {limit} s", codes.TIME_LIMIT)
    return None


def _failed(rank: int, code: int, run: RunDir) -> Json:
    # The entrypoint leaves its record just before the rank's command takes over.
    record = run.rank_record(rank)
    origin = "workload" if record else "toolkit"
    host = record["host"] if record else platform.node()
    return finish.failure(origin, finish.exit_reason(code), code, rank, host)


def _end(
    ranks: list[_Rank],
    grace: float,
    signals: Signals,
    tell: Tell,
) -> None:
    """End every rank that still runs: SIGTERM, the grace, SIGKILL; at once on a second signal.

    Who does not listen to SIGTERM has nothing to save, and gets no more than two seconds.
    """
    before = signals.count
    groups = {rank.number: rank.process for rank in ranks}
    hearing = listening()
    left = {number: one for number, one in groups.items() if one.poll() is None}
    if left:
        tell(left, signal.SIGTERM)
    begun = time.monotonic()
    while signals.count == before:
        left = {
            number: one
            for number, one in groups.items()
            if one.poll() is None or one.pid in hearing
        }
        hears = any(one.pid in hearing for one in left.values())
        if not left or time.monotonic() > begun + (grace if hears else GRACE_S):
            break
        time.sleep(0.05)
        hearing = listening()
    for rank in ranks:
        # Also what an ended rank left running in its group.
        signal_group(rank.process, signal.SIGKILL)
        rank.process.wait()


def listening() -> set[int]:
    """The groups in which a process has a handler for SIGTERM."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            group = int((folder / "stat").read_bytes().rpartition(b")")[2].split()[2])
            status = (folder / "status").read_bytes()
        except (OSError, IndexError, ValueError):
            continue
        caught = re.search(rb"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
        if caught and int(caught[1], 16) >> (signal.SIGTERM - 1) & 1:
            found.add(group)
    return found


def _free_port(seed: int) -> int:
    """A port that nothing listens on, outside the range that outgoing connections use."""
    for step in range(len(_PORTS)):
        port = _PORTS[(seed + step) % len(_PORTS)]
        with socket.socket() as probe_socket:
            probe_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe_socket.bind(("", port))
            except OSError:
                continue
            return port
    msg = f"No free port was found between {_PORTS.start} and {_PORTS.stop - 1}."
    raise UnavailableError(msg)
