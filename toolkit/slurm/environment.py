"""Variables of a job: what of the caller's must not reach it, what is set, whether it fits.

Slurm's commands take every option from a variable too (``SLURM_NTASKS``, ``SBATCH_PARTITION``), and
a job's own variables are such options to the next command typed inside it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from toolkit.common.secrets import is_secret
from toolkit.entrypoint import run_files
from toolkit.entrypoint.hostlist import expand, tasks_per_node
from toolkit.entrypoint.launchers import is_left_behind
from toolkit.entrypoint.world import EntrypointError
from toolkit.errors import UnavailableError
from toolkit.job import Allocation

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from toolkit.job import Job
    from toolkit.options import JobSpec

_MASTER = frozenset({"MASTER_ADDR", "MASTER_PORT"})

#: What describes the allocation and is no option to srun; a step in it keeps these.
_ALLOCATION = (
    "SLURM_JOB_",
    "SLURM_ARRAY_",
    "SLURM_SUBMIT_",
    "SLURM_HET_",
)
_ALLOCATION_NAMES = frozenset(
    {"SLURM_JOBID", "SLURM_CLUSTER_NAME", "SLURM_NODE_ALIASES", "SLURM_RESTART_COUNT"}
)

#: Read by the entrypoint; an image's own value must not win over the caller's.
_READ_BY_ENTRYPOINT = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "TOOLKIT_RANKS_FROM",
    "TOOLKIT_STRICT",
    "TOOLKIT_RENDEZVOUS_TIMEOUT",
)


def allocation(environ: Mapping[str, str]) -> Allocation | None:
    """The allocation that ``environ`` describes; None outside of one.

    The ``local`` target gives its ranks a job id too; that is no job of Slurm's.
    """
    job_id = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    if not job_id or environ.get("TOOLKIT_TARGET") == "local":
        return None
    nodes = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or ""
    cpus: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    with contextlib.suppress(KeyError, EntrypointError):
        cpus = tuple(tasks_per_node(environ["SLURM_JOB_CPUS_PER_NODE"]))
        hosts = tuple(expand(environ["SLURM_JOB_NODELIST"]))
    return Allocation(job_id, int(nodes) if nodes.isdecimal() else None, cpus, hosts)


def fits(spec: JobSpec, job: Allocation) -> None:
    """Check that a step fits into the allocation that we are in, as far as that is known.

    Raises:
        UnavailableError: if it does not: srun would refuse it, or wait for ever.
    """
    if job.nodes is not None and spec.nodes > job.nodes:
        msg = (
            f"--nodes {spec.nodes}: the allocation you are in (SLURM_JOB_ID={job.job_id}) has"
            f" {job.nodes}. Ask for fewer, leave it (exit), or use toolkit submit for a new job."
        )
        raise UnavailableError(msg)
    each = spec.cpus_per_task or 1
    most = sorted(job.cpus, reverse=True)[: spec.nodes]
    short = sum(most) < spec.world_size * each
    if spec.cpus_per_task:  # else ranks may share the CPUs of a node that got few: see uneven()
        short = any(cpus < spec.ntasks_per_node * each for cpus in most)
    if job.cpus and short:
        msg = (
            f"{spec.ntasks_per_node} tasks of {each} CPUs on each of {spec.nodes} nodes do not fit"
            f" into the allocation you are in (SLURM_JOB_ID={job.job_id}), whose nodes have"
            f" {', '.join(map(str, most))} CPUs. Ask for fewer (--ntasks-per-node,"
            " --cpus-per-task), or use toolkit submit for a new job."
        )
        raise UnavailableError(msg)


def uneven(spec: JobSpec, job: Allocation) -> tuple[str, ...]:
    """The node of each rank, where srun must be told; empty where it finds out.

    ``salloc -N2 -n8`` may get 7 CPUs on one node and 1 on the other. ``--ntasks-per-node=2`` does
    not keep srun from starting 3 ranks and 1 there.
    """
    if spec.task == run_files.NODE or len(job.cpus) != len(job.hosts):
        return ()
    by_cpus = sorted(range(len(job.hosts)), key=lambda node: -job.cpus[node])
    chosen = sorted(by_cpus[: spec.nodes])
    if all(job.cpus[node] >= spec.ntasks_per_node for node in chosen):
        return ()
    return tuple(job.hosts[node] for node in chosen for _ in range(spec.ntasks_per_node))


#: What a run around this one has set, or the image that it runs in; and the variable of an option
#: that the entrypoint still reads by its old meaning.
_OF_THIS_RUN = frozenset(
    {"TOOLKIT_INIT_METHOD", "TOOLKIT_EXPECTED_BUILD", "TOOLKIT_IMAGE_BUILD", "TOOLKIT_LAUNCHER"}
)


def outer(
    environ: Mapping[str, str], asked: Collection[str] = (), *, step: bool = False
) -> tuple[str, ...]:
    """Names in ``environ`` that must not reach Slurm's commands or the ranks, sorted.

    Kept are SLURM_CONF, what the user asked for with ``--env``, for a step also what describes its
    allocation and a MASTER_ADDR of the batch script around it. MASTER_PORT is the user's own,
    unless the caller is itself a rank.
    """
    is_rank = bool(environ.get("RANK") or environ.get("SLURM_STEP_ID"))

    def drop(name: str) -> bool:
        if name in asked or name == "SLURM_CONF":
            return False
        if step and (name.startswith(_ALLOCATION) or name in _ALLOCATION_NAMES):
            return False
        if name in _MASTER:
            return is_rank or (name == "MASTER_ADDR" and not step)
        return is_left_behind(name) or name in _OF_THIS_RUN

    return tuple(sorted(filter(drop, environ)))


def container_env(job: Job) -> tuple[str, ...]:
    """The names for ``--container-env``: without it a value of the image's wins over the job's."""
    kept = [n for n in _READ_BY_ENTRYPOINT if n in job.environ and n not in job.unset]
    return tuple(dict.fromkeys([*job.variables(), *job.spec.env_names, *kept]))


def through_sbatch(name: str, value: str) -> bool:
    """Whether a variable must be in sbatch's own environment rather than in the script's text.

    Secrets are in no file, and Slurm's variables are options to sbatch.
    """
    return is_secret(name, value) or name.startswith(("SBATCH_", "SLURM_"))
