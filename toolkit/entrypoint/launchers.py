"""What each launcher says about a process's rank: one function per launcher, in order of trust.

A function returns None where its launcher did not start this process, and raises
:class:`EntrypointError` where it did but what it left is partial or contradicts itself. All ranks
come from one launcher. ``forced`` is True where ``TOOLKIT_LAUNCHER`` names it: then what is
missing is an error, and variables that disagree with it are ignored.
"""

from __future__ import annotations

from toolkit.entrypoint.rendezvous import is_loopback
from toolkit.entrypoint.world import EntrypointError, Ranks, quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from toolkit.entrypoint.world import Variables

    Number = tuple[int, str]  # a number and where it came from
    Maybe = tuple["int | None", str]

NODE_RANK = ("NODE_RANK", "GROUP_RANK")
NUM_NODES = ("NUM_NODES", "NNODES", "GROUP_WORLD_SIZE")


def find_ranks(variables: Variables) -> Ranks:
    """The ranks from the launcher that started this process.

    Raises:
        EntrypointError: the launcher's variables are partial or contradict each other.
    """
    launchers = {
        "torchrun": torchrun,
        "mpi": mpi,
        "slurm": slurm,
        "pmi": pmi,
        "env": env,
        "none": none,
    }
    chosen = variables.get("TOOLKIT_LAUNCHER")
    if chosen and chosen not in launchers:
        raise EntrypointError(
            f"TOOLKIT_LAUNCHER={quote(chosen)} is not a launcher: choose one of "
            f"{', '.join(launchers)}, or unset it."
        )
    for name, launcher in launchers.items():
        if chosen in (None, name):
            ranks = launcher(variables, forced=chosen is not None)
            if ranks:
                return ranks
    raise AssertionError("none() always answers")


# --- torchrun ------------------------------------------------------------------------------------


def torchrun(variables: Variables, *, forced: bool) -> Ranks | None:
    """torchrun and torch.distributed.elastic, whose mark is TORCHELASTIC_RUN_ID.

    It stands above a Slurm step because ``srun torchrun`` leaves each worker the step of its
    agent. GROUP_RANK is the agent's, that is the node's, rank.
    """
    names = ("WORLD_SIZE", "RANK", "LOCAL_RANK")
    if not forced and not all(variables.get(name) for name in ("TORCHELASTIC_RUN_ID", *names)):
        return None
    size, rank, local_rank = (variables.require(name, "torchrun") for name in names)
    warnings: list[str] = []
    local_size = _local_world_size(variables, size, rank, local_rank, warnings)
    ranks = _lay_out(
        "torchrun",
        (size, "WORLD_SIZE"),
        (rank, "RANK"),
        (local_rank, "LOCAL_RANK"),
        local_size,
        variables.number("GROUP_RANK", "NODE_RANK"),
        variables.number("GROUP_WORLD_SIZE", "NUM_NODES", "NNODES"),
    )
    ranks.warnings += warnings
    _key_by_job(variables, ranks)
    return ranks


# --- mpirun --------------------------------------------------------------------------------------


def mpi(variables: Variables, *, forced: bool) -> Ranks | None:
    """Open MPI's mpirun, whose marks are OMPI_COMM_WORLD_*.

    It stands above a Slurm step because mpirun in an allocation starts its daemons by srun, and
    each rank then sees the daemon's step, complete but wrong. OMPI_MCA_*, PRTE_* and HYDRA_* are
    no sign of it: Slurm 24.11 sets them in every task. OMPI_COMM_WORLD_NODE_RANK is the rank
    among the processes of a node, not the node's.
    """
    prefix = "OMPI_COMM_WORLD_"
    names = [prefix + name for name in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE")]
    if not forced and not any(variables.get(name) for name in names):
        return None
    # Half a set is an error even beside a Slurm step: the step's ranks would be duplicates.
    size, rank, local_rank, local_size = (variables.require(name, "mpi") for name in names)
    ranks = _lay_out(
        "mpi",
        (size, names[0]),
        (rank, names[1]),
        (local_rank, names[2]),
        (local_size, names[3]),
        variables.number(*NODE_RANK),
        variables.number(*NUM_NODES),
    )
    _key_by_namespace(variables, ranks)
    return ranks


# --- Slurm ---------------------------------------------------------------------------------------

# Steps that are no tasks of srun (batch, extern, interactive, pending) have ids above this one.
# Source: SLURM_MAX_NORMAL_STEP_ID in slurm.h.
MAX_NORMAL_STEP_ID = 0xFFFFFFF0
STEP_MARKS = (
    "SLURM_STEP_ID",
    "SLURM_STEPID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_STEP_NUM_NODES",
    "SLURM_STEP_NODELIST",
)


def slurm(variables: Variables, *, forced: bool) -> Ranks | None:
    """A task of a Slurm step, whose marks are SLURM_STEP_*.

    A batch script and a shell of salloc have SLURM_PROCID and the job's SLURM_NTASKS, but are no
    step. The job's values are stale in a smaller step (JOB_NODELIST, JOB_NUM_NODES and
    NTASKS_PER_NODE stay as they were), so they count only where the step has none of its own.
    SLURM_JOB_NAME says nothing: ``interactive`` is only salloc's default.
    """
    step_id, _ = variables.number("SLURM_STEP_ID", "SLURM_STEPID")
    special = step_id is not None and step_id > MAX_NORMAL_STEP_ID
    if special or not any(variables.get(name) for name in STEP_MARKS):
        if forced:
            raise EntrypointError(
                f"TOOLKIT_LAUNCHER=slurm, but SLURM_STEP_ID is {step_id or 'not set'}: this "
                "process is no task of a Slurm step; start it with srun."
            )
        return None
    from toolkit.entrypoint.step import read_step

    ranks = read_step(variables)
    if not forced:
        _agree_with_step(variables, ranks)
    job, job_source = variables.number("SLURM_JOB_ID", "SLURM_JOBID")
    if job is not None:
        # Never SLURM_ARRAY_JOB_ID, which all elements of an array share.
        ranks.port_key = (job, step_id or 0)
        ranks.port_key_source = job_source
    return ranks


def _agree_with_step(variables: Variables, ranks: Ranks) -> None:
    """RANK and the like may stand beside a step (pyxis and enroot's hook set them) if they agree.

    Raises:
        EntrypointError: one of them says something else.
    """
    for field in ("rank", "world_size", "local_rank", "local_world_size"):
        ours = getattr(ranks, field)
        theirs, name = variables.number(field.upper())
        if theirs is not None and theirs != ours:
            raise EntrypointError(
                f"{name}={theirs}, but the Slurm step says {ours} (from {ranks.sources[field]}): "
                f"unset {name} if it is stale, set TOOLKIT_LAUNCHER=env if it is right, or "
                "TOOLKIT_LAUNCHER=slurm to go by the step.",
                rank=ranks.rank,
            )
    node_rank, name = variables.number("NODE_RANK")
    if node_rank not in (None, ranks.node_rank):
        # Common and harmless: exported in the batch script from its own SLURM_NODEID.
        text = f"NODE_RANK={node_rank} is replaced by the Slurm step's {ranks.node_rank}"
        ranks.warnings.append(text)
        ranks.node_warnings.append(text)
    size, name = variables.number("PMI_SIZE")
    if size is not None and size > ranks.world_size:
        raise EntrypointError(
            f"{name}={size}, but the Slurm step has {ranks.world_size} tasks (from "
            f"{ranks.sources['world_size']}), as when mpiexec started this rank from a step of "
            "its own: set TOOLKIT_LAUNCHER=pmi if it did, else TOOLKIT_LAUNCHER=slurm.",
            rank=ranks.rank,
        )


# --- PMI, PMIx -----------------------------------------------------------------------------------


def pmi(variables: Variables, *, forced: bool) -> Ranks | None:
    """PMI or PMIx alone: MPICH's and Intel's mpiexec (hydra), Cray's PALS, MVAPICH.

    Each gives PMI_RANK and PMI_SIZE and has its own name for the place on the node. PMIx gives a
    rank without a size, which is not enough.
    """
    rank, rank_name = variables.number("PMI_RANK", "PMIX_RANK")
    size, size_name = variables.number("PMI_SIZE")
    if not forced:
        if rank is None and size is None:
            return None
        if rank == 0 and size in (None, 1) and variables.get("SLURM_PROCID") == "0":
            return None  # a batch or interactive step's own, as no task step is here
        if size is None and rank == variables.number("RANK")[0] and _has_env(variables):
            return None  # completed by hand
    if rank is None:
        rank = variables.require("PMI_RANK", "pmi")
    if size is None:
        raise EntrypointError(
            f"{rank_name}={rank} is a rank without a size (PMI_SIZE is not set): set RANK, "
            "WORLD_SIZE and LOCAL_RANK as well, or TOOLKIT_LAUNCHER=none to run alone.",
            rank=rank,
        )
    local_rank, local_rank_name = variables.number(
        "MPI_LOCALRANKID", "PMI_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK"
    )
    local_size, local_size_name = variables.number(
        "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"
    )
    if size == 1:
        local_rank, local_size = local_rank or 0, local_size or 1
    if local_rank is None or local_size is None:
        missing = local_rank_name if local_rank is None else local_size_name
        raise EntrypointError(
            f"{rank_name}={rank} of {size_name}={size}, but {missing} is not set, so the place on "
            "the node is unknown: set MPI_LOCALRANKID and MPI_LOCALNRANKS.",
            rank=rank,
        )
    ranks = _lay_out(
        "pmi",
        (size, size_name),
        (rank, rank_name),
        (local_rank, local_rank_name),
        (local_size, local_size_name),
        variables.number(*NODE_RANK),
        variables.number(*NUM_NODES),
    )
    _key_by_namespace(variables, ranks)
    return ranks


# --- variables set by a container or a user ------------------------------------------------------


def env(variables: Variables, *, forced: bool) -> Ranks | None:
    """RANK, WORLD_SIZE and LOCAL_RANK as a user, a container or another launcher set them."""
    names = ("WORLD_SIZE", "RANK", "LOCAL_RANK")
    found = [name for name in names if variables.get(name)]
    if not forced and (not found or _set_by_pyxis(variables)):
        return None
    if not forced and len(found) < len(names):
        missing = " and ".join(name for name in names if name not in found)
        shown = ", ".join(f"{name}={quote(variables.get(name) or '')}" for name in found)
        raise EntrypointError(
            f"{shown} but not {missing}: half a set of rank variables, and no launcher's that "
            f"would complete it; set {missing}, or unset {' and '.join(found)}."
        )
    size, rank, local_rank = (variables.require(name, "env") for name in names)
    warnings: list[str] = []
    ranks = _lay_out(
        "env",
        (size, "WORLD_SIZE"),
        (rank, "RANK"),
        (local_rank, "LOCAL_RANK"),
        _local_world_size(variables, size, rank, local_rank, warnings),
        variables.number(*NODE_RANK),
        variables.number(*NUM_NODES),
    )
    ranks.warnings += warnings
    _key_by_job(variables, ranks)
    return ranks


def _has_env(variables: Variables) -> bool:
    return all(variables.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))


def _set_by_pyxis(variables: Variables) -> bool:
    """Whether RANK and the like are only what pyxis puts in a batch script's container.

    Where the image has PYTORCH_VERSION, pyxis sets RANK and LOCAL_RANK from SLURM_PROCID and
    SLURM_LOCALID, and enroot's hook WORLD_SIZE from SLURM_NTASKS: all of it true in a step, none
    of it in the batch script, whose other ranks do not exist.
    """
    return (
        bool(variables.get("PYTORCH_VERSION") and variables.get("SLURM_PROCID"))
        and variables.get("RANK") == variables.get("SLURM_PROCID")
        and variables.get("LOCAL_RANK") == variables.get("SLURM_LOCALID")
        and variables.get("WORLD_SIZE") in (None, variables.get("SLURM_NTASKS"))
        and not variables.get("LOCAL_WORLD_SIZE")
    )


# --- no launcher ---------------------------------------------------------------------------------


def none(variables: Variables, *, forced: bool) -> Ranks | None:
    """One process; a warning where it sits in an allocation that asks for more."""
    alone = "no launcher"
    ranks = Ranks("none", (1, alone), (0, alone), (0, alone), (1, alone), (0, alone), (1, alone))
    if forced:
        return ranks
    tasks, name = variables.number("SLURM_NTASKS", "SLURM_NPROCS")
    if tasks is None:
        layout, name = variables.first("SLURM_TASKS_PER_NODE")
        if layout:
            from toolkit.entrypoint.hostlist import tasks_per_node

            tasks = sum(tasks_per_node(layout))
        else:
            tasks, name = variables.number("SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    if tasks is not None and tasks > 1:
        ranks.warnings.append(
            f"the allocation asks for {tasks} tasks (from {name}) but this process was not "
            "started by srun, so it runs alone; start it with srun, or set TOOLKIT_LAUNCHER=none "
            "if one process is meant"
        )
    return ranks


# --- shared --------------------------------------------------------------------------------------


def _local_world_size(
    variables: Variables, size: int, rank: int, local_rank: int, warnings: list[str]
) -> Number:
    """LOCAL_WORLD_SIZE, or the best guess at it, with a warning where it is a guess."""
    given, name = variables.number("LOCAL_WORLD_SIZE")
    if given is not None:
        return given, name
    nodes, nodes_name = variables.number(*NUM_NODES)
    if nodes and size % nodes == 0:
        return size // nodes, f"WORLD_SIZE / {nodes_name}"
    address = variables.get("MASTER_ADDR")
    if nodes is None and (address is None or is_loopback(address)):
        return size, "WORLD_SIZE"
    # Nodes that are alike hold d ranks each: d divides the size, and the first rank of this node.
    from math import gcd

    guess = gcd(rank - local_rank, size)
    if guess <= local_rank or rank < local_rank:
        raise EntrypointError(
            f"LOCAL_WORLD_SIZE is not set and no count of ranks per node fits RANK={rank}, "
            f"WORLD_SIZE={size}, LOCAL_RANK={local_rank}: set LOCAL_WORLD_SIZE.",
            rank=rank,
        )
    warnings.append(
        f"LOCAL_WORLD_SIZE is not set; {guess} is inferred from RANK, WORLD_SIZE and LOCAL_RANK, "
        "set it to be sure"
    )
    return guess, "RANK, WORLD_SIZE, LOCAL_RANK"


def _lay_out(
    launcher: str,
    size: Number,
    rank: Number,
    local_rank: Number,
    local_size: Number,
    node_rank: Maybe,
    num_nodes: Maybe,
) -> Ranks:
    """Complete a launcher's ranks with the node's, where nodes are alike.

    Ranks then go to nodes in blocks (0 0 1 1) or by node (0 1 0 1): whichever agrees with the
    local rank.

    Raises:
        EntrypointError: neither agrees, or the nodes are not alike.
    """
    nodes, nodes_source = num_nodes
    node, node_source = node_rank
    reason = ""
    if nodes is None:
        if 0 < local_size[0] and size[0] % local_size[0] == 0:
            nodes, nodes_source = size[0] // local_size[0], f"{size[1]} / {local_size[1]}"
        else:
            reason = f"{size[1]}={size[0]} is no multiple of {local_size[1]}={local_size[0]}"
    if nodes and node is None:
        node_source = f"{rank[1]}, {local_rank[1]}"
        if local_size[0] and divmod(rank[0], local_size[0])[1] == local_rank[0]:
            node = rank[0] // local_size[0]
        elif rank[0] // nodes == local_rank[0]:
            node = rank[0] % nodes
        else:
            reason = (
                f"{local_rank[1]}={local_rank[0]} fits {rank[1]}={rank[0]} of {size[1]}={size[0]} "
                f"neither in blocks of {local_size[0]} ({local_size[1]}) nor dealt over "
                f"{nodes} nodes"
            )
    if nodes is None or node is None:
        raise EntrypointError(
            f"The node of this rank cannot be told: {reason or 'the number of nodes is 0'}. "
            "Correct these, or set NODE_RANK and NUM_NODES.",
            rank=rank[0],
        )
    return Ranks(
        launcher, size, rank, local_rank, local_size, (node, node_source), (nodes, nodes_source)
    )


def _key_by_job(variables: Variables, ranks: Ranks) -> None:
    """Name this world, for its port, by the Slurm job alone: its ranks may be in several steps."""
    job, name = variables.number("SLURM_JOB_ID", "SLURM_JOBID")
    if job is not None and ranks.world_size > 1:
        ranks.port_key = (job,)
        ranks.port_key_source = name


def _key_by_namespace(variables: Variables, ranks: Ranks) -> None:
    """Name this world by mpirun's own id, which all its ranks share, or else by the Slurm job."""
    namespace, name = variables.first("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    if namespace and ranks.world_size > 1:
        ranks.port_key = (namespace,)
        ranks.port_key_source = name
    else:
        _key_by_job(variables, ranks)
