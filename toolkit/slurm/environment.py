"""Variables of a job: what of the caller's must not reach it, what is set, whether it fits.

Slurm's commands take every option from a variable too (``SLURM_NTASKS``, ``SBATCH_PARTITION``), and
a job's own variables are such options to the next command typed inside it.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from toolkit.entrypoint.hostlist import expand, tasks_per_node
from toolkit.entrypoint.world import EntrypointError
from toolkit.errors import UnavailableError, UsageError
from toolkit.job import is_secret

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from toolkit.job import JobSpec

#: Where the run directory is in every container. No host has such a path, so a site that ignores
#: --container-image fails at once instead of running outside of the image.
RUN_DIR = "/toolkit-run"

#: What launchers and their plugins leave behind. pyxis takes PYXIS_CONTAINER_IMAGE and the like as
#: options, which would put a job without a container into one.
_LAUNCHERS = (
    "SLURM_",
    "SLURMD_",
    "SBATCH_",
    "SRUN_",
    "SALLOC_",
    "SPANK_",
    "_SLURM_SPANK_",
    "PYXIS_",
    "PMI_",
    "PMIX_",
    "PMI2_",
    "OMPI_",
    "PRTE_",
    "HYDRA_",
    "MPI_LOCAL",
    "TORCHELASTIC_",
    "GROUP_",
    "ROLE_",
)
_RANKS = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK"})
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

#: The login node's own software, which breaks programs in a container (PYTHONHOME kills python3 at
#: its start). Names that end in ``_`` stand for all that begin so.
LOGIN_NODE = (
    "PYTHONHOME",
    "PYTHONPATH",
    "PYTHONSTARTUP",
    "PYTHONUSERBASE",
    "PYTHONEXECUTABLE",
    "PYTHONPLATLIBDIR",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "LD_AUDIT",
    "VIRTUAL_ENV",
    "VIRTUAL_ENV_PROMPT",
    "CONDA_",
    "_CE_",
    "MAMBA_",
)

#: Read by the entrypoint; an image's own value must not win over the caller's.
_READ_BY_ENTRYPOINT = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "TOOLKIT_LAUNCHER",
    "TOOLKIT_STRICT",
    "TOOLKIT_RENDEZVOUS_TIMEOUT",
)


@dataclass(frozen=True)
class Allocation:
    """A job that we are in, from its variables. What they do not tell is None, or empty."""

    job_id: str
    nodes: int | None
    cpus: tuple[int, ...] = ()  #: of the job, on each node
    hosts: tuple[str, ...] = ()


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


def fits(spec: JobSpec, environ: Mapping[str, str]) -> None:
    """Check that a step fits into the allocation that ``environ`` describes, where it tells.

    Raises:
        UnavailableError: if it does not: srun would refuse it, or wait for ever.
    """
    job = allocation(environ)
    if job is None:
        return
    if job.nodes is not None and spec.nodes > job.nodes:
        msg = (
            f"--nodes {spec.nodes}: the allocation you are in (SLURM_JOB_ID={job.job_id}) has"
            f" {job.nodes}. Ask for fewer, leave it (exit), or use toolkit submit for a new job."
        )
        raise UnavailableError(msg)
    each = spec.cpus_per_task or 1
    most = sorted(job.cpus, reverse=True)[: spec.nodes]
    short = sum(most) < spec.ntasks * each
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
    if spec.launcher == "torchrun" or len(job.cpus) != len(job.hosts):
        return ()
    by_cpus = sorted(range(len(job.hosts)), key=lambda node: -job.cpus[node])
    chosen = sorted(by_cpus[: spec.nodes])
    if all(job.cpus[node] >= spec.ntasks_per_node for node in chosen):
        return ()
    return tuple(job.hosts[node] for node in chosen for _ in range(spec.ntasks_per_node))


# What a run around this one has set, or the image that it runs in.
_OF_THIS_RUN = ("TOOLKIT_INIT_METHOD", "TOOLKIT_EXPECTED_BUILD", "TOOLKIT_IMAGE_BUILD")


def outer(environ: Mapping[str, str], spec: JobSpec, *, step: bool = False) -> tuple[str, ...]:
    """Names in ``environ`` that must not reach Slurm's commands or the ranks, sorted.

    Kept are SLURM_CONF, what the user names with ``--env``, for a step also what describes its
    allocation and a MASTER_ADDR of the batch script around it. MASTER_PORT is the user's own,
    unless the caller is itself a rank.
    """
    asked = asked_for(spec)
    is_rank = bool(environ.get("RANK") or environ.get("SLURM_STEP_ID"))

    def drop(name: str) -> bool:
        if name in asked or name == "SLURM_CONF":
            return False
        if step and (name.startswith(_ALLOCATION) or name in _ALLOCATION_NAMES):
            return False
        if name in _MASTER:
            return is_rank or (name == "MASTER_ADDR" and not step)
        return name.startswith(_LAUNCHERS) or name in _RANKS or name in _OF_THIS_RUN

    return tuple(sorted(filter(drop, environ)))


def login_node(spec: JobSpec) -> tuple[str, ...]:
    """The variables of :data:`LOGIN_NODE` that stay out of a container: all but those asked for."""
    if spec.container_image is None:
        return ()
    asked = asked_for(spec)
    return tuple(name for name in LOGIN_NODE if name not in asked)


def asked_for(spec: JobSpec) -> frozenset[str]:
    """The names that the user gave with ``--env``."""
    return frozenset({*dict(spec.env), *spec.env_names})


def variables(spec: JobSpec, run_dir: str, fresh: str = "") -> dict[str, str]:
    """What is set for the ranks, the user's own last.

    Args:
        spec: the job.
        run_dir: the run directory as the ranks see it.
        fresh: ends the name of the rendezvous file: it must differ whenever a job starts again,
            since torch never meets at a file that an earlier attempt left.
    """
    own = {"TOOLKIT_TARGET": "slurm", "TOOLKIT_RUN_DIR": run_dir, "PYTHONUNBUFFERED": "1"}
    if spec.container_image is not None and spec.container_mount_home:
        own["PYTHONNOUSERSITE"] = "1"  # ~/.local is the login node's, for another Python
    if spec.container_build:
        own["TOOLKIT_EXPECTED_BUILD"] = spec.container_build
    if spec.rendezvous == "file":
        if set("?#") & set(run_dir):
            msg = f"--rendezvous file: {run_dir} has a ? or #, which cuts a file:// address short."
            raise UsageError(f"{msg} Choose another folder with --runs DIR.")
        own["TOOLKIT_INIT_METHOD"] = f"file://{run_dir}/rendezvous{fresh}"
    return {**own, **dict(spec.env)}


def container_env(
    spec: JobSpec, names: Iterable[str], environ: Mapping[str, str], unset: Iterable[str]
) -> tuple[str, ...]:
    """The names for ``--container-env``: without it a value of the image's wins over the job's.

    Args:
        spec: the job.
        names: what :func:`variables` sets.
        environ: the caller's environment.
        unset: what :func:`outer` drops from it.
    """
    passed = [name for name in _READ_BY_ENTRYPOINT if name in environ and name not in unset]
    return tuple(dict.fromkeys([*names, *spec.env_names, *passed]))


def require(spec: JobSpec, environ: Mapping[str, str]) -> None:
    """Raise UsageError where ``--env NAME`` names a variable that is not set."""
    for name in spec.env_names:
        if name not in environ:
            msg = f"--env {name}: {name} is not set in your environment. Export it first."
            raise UsageError(msg)


def through_sbatch(name: str) -> bool:
    """Whether a variable must be in sbatch's own environment rather than in the script's text.

    Secrets are in no file, and Slurm's variables are options to sbatch.
    """
    return is_secret(name) or name.startswith(("SBATCH_", "SLURM_"))
