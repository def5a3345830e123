"""The ``local`` target: N nodes of M tasks as processes on this machine.

Each process gets the variables that a Slurm step would give it and is started through the same
``entrypoint.pyz``, so that what resolves its rank here is what resolves it on a cluster.
``TOOLKIT_TARGET=local`` tells the entrypoint that these "nodes" share one loopback.
"""

from __future__ import annotations

import contextlib
import os
import platform
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from toolkit import run_dir as run_dirs
from toolkit.common.capture import capture
from toolkit.common.process import Signals, exit_code, signal_group, start
from toolkit.entrypoint import codes, finish, run_files
from toolkit.errors import UnavailableError
from toolkit.options import JobSpec
from toolkit.plan import Outcome, Plan, Process

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from toolkit.entrypoint.finish import Json
    from toolkit.job import Job
    from toolkit.run_dir import RunDir
    from toolkit.targets import View

#: A failed or cancelled run's other ranks get this long between SIGTERM and SIGKILL.
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
    """A started rank: its process, the thread that reads its output, its log."""

    def __init__(
        self, rank: int, process: subprocess.Popen[bytes], log: IO[bytes], view: View
    ) -> None:
        self.rank = rank
        self.process = process
        self._log = log
        self._view = view
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._log.write(line)
            self._log.flush()
            self._view.line(f"rank {self.rank}", line.decode(errors="replace").rstrip("\r\n"))

    def drain(self) -> None:
        """Read what is left; a grandchild that holds the pipe open is not waited for."""
        self._reader.join(timeout=1.0)
        if not self._reader.is_alive():
            self._log.close()
            if self.process.stdout is not None:
                self.process.stdout.close()


def run(job: Job, plan: Plan, run: RunDir, view: View) -> Outcome:
    """Start every rank, pass on what they print, and end all within seconds when one fails.

    A time limit ends the run with 124, SIGINT and SIGTERM with 130.
    """
    begun = time.time()
    ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    ranks: list[_Rank] = []
    failure: Json | None = None
    with Signals() as signals:
        try:
            for number, process in enumerate(plan.processes):
                started = start(process.argv, plan.environment(process, job.environ), plan.cwd)
                ranks.append(_Rank(number, started, run.log(number).open("wb"), view))
                threading.Thread(target=_report, args=(ranks[-1], ended), daemon=True).start()
            limit = job.spec.time
            deadline = begun + limit if limit else None
            running = len(ranks)
            while running and failure is None:
                view.poll(run)
                failure = _interrupted(signals, deadline, limit)
                try:
                    rank, code = ended.get(timeout=0.1)
                except queue.Empty:
                    continue
                running -= 1
                if code and failure is None:
                    failure = _failed(rank, code, run)
        finally:
            _end(ranks)
    view.poll(run)
    return Outcome(
        exit_code=failure["exit_code"] if failure else 0,
        started=begun,
        ended=time.time(),
        hosts=tuple(finish.hosts(finish.rank_records(str(run.path))))
        or (platform.node(),) * job.spec.nodes,
        failure=failure,
    )


def _report(rank: _Rank, ended: queue.SimpleQueue[tuple[int, int]]) -> None:
    ended.put((rank.rank, exit_code(rank.process)))


def _interrupted(signals: Signals, deadline: float | None, limit: int | None) -> Json | None:
    if signals.caught is not None:
        return finish.failure("toolkit", f"was cancelled by {signals.caught.name}", codes.CANCELLED)
    if deadline is not None and time.time() > deadline:
        return finish.failure("toolkit", f"reached its time limit of {limit} s", codes.TIME_LIMIT)
    return None


def _failed(rank: int, code: int, run: RunDir) -> Json:
    # The entrypoint leaves its record just before the rank's command takes over.
    record = run.rank_record(rank)
    origin = "workload" if record else "toolkit"
    host = record["host"] if record else platform.node()
    return finish.failure(origin, finish.exit_reason(code), code, rank, host)


def _end(ranks: list[_Rank]) -> None:
    """End every rank that still runs: SIGTERM, a short grace, SIGKILL."""
    for rank in ranks:
        if rank.process.poll() is None:
            signal_group(rank.process, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    for rank in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.process.wait(timeout=max(0.0, deadline - time.monotonic()))
    for rank in ranks:
        signal_group(
            rank.process, signal.SIGKILL
        )  # also what an ended rank left running in its group
        rank.process.wait()
        rank.drain()


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
