"""Ranks completed with the node's, for launchers that say nothing about nodes."""

from __future__ import annotations

from toolkit.entrypoint.rendezvous import is_loopback
from toolkit.entrypoint.world import EntrypointError, Ranks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from toolkit.entrypoint.world import Number, Variables

NODE_RANK = ("NODE_RANK", "GROUP_RANK")
NUM_NODES = ("NUM_NODES", "NNODES", "GROUP_WORLD_SIZE")


def lay_out(
    variables: Variables,
    launcher: str,
    *,
    world_size: Number,
    rank: Number,
    local_rank: Number,
    local_world_size: Number,
    node_rank: tuple[str, ...] = NODE_RANK,
    num_nodes: tuple[str, ...] = NUM_NODES,
) -> Ranks:
    """Complete a launcher's ranks with the node's, where nodes are alike.

    Ranks then go to nodes in blocks (0 0 1 1) or by node (0 1 0 1): whichever agrees with the
    local rank. The variables in ``node_rank`` and ``num_nodes`` come first where they are set.

    Raises:
        EntrypointError: neither agrees, or the nodes are not alike.
    """
    reason = "the number of nodes is 0"
    size, each = world_size[0], local_world_size[0]
    nodes: int | None = 1
    node: int | None = 0
    nodes_source = node_source = world_size[1]
    if size != 1:  # one process is on one node, whatever a template left in NNODES
        nodes, nodes_source = variables.number(*num_nodes)
        node, node_source = variables.number(*node_rank)
    if nodes is None:
        if each and size % each == 0:
            nodes, nodes_source = size // each, f"{world_size[1]} / {local_world_size[1]}"
        else:
            reason = f"{world_size[1]}={size} is no multiple of {local_world_size[1]}={each}"
    if nodes and node is None:
        node_source = f"{rank[1]}, {local_rank[1]}"
        if each and rank[0] % each == local_rank[0]:
            node = rank[0] // each
        elif rank[0] // nodes == local_rank[0]:
            node = rank[0] % nodes
        else:
            reason = (
                f"{local_rank[1]}={local_rank[0]} fits {rank[1]}={rank[0]} of "
                f"{world_size[1]}={size} neither in blocks of {each} ({local_world_size[1]}) nor "
                f"dealt over {nodes} nodes"
            )
    if nodes is None or node is None:
        raise EntrypointError(
            f"The node of this rank cannot be told: {reason}. Correct these, or set NODE_RANK and "
            "NUM_NODES.",
            rank=rank[0],
        )
    return Ranks(
        launcher,
        world_size=world_size,
        rank=rank,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=(node, node_source),
        num_nodes=(nodes, nodes_source),
    )


def lay_out_torch(
    variables: Variables,
    launcher: str,
    node_rank: tuple[str, ...] = NODE_RANK,
    num_nodes: tuple[str, ...] = NUM_NODES,
) -> Ranks:
    """The ranks in torch's own variables: RANK, WORLD_SIZE and LOCAL_RANK must be there.

    LOCAL_WORLD_SIZE is inferred where it is not set, with a warning where that is a guess.

    Raises:
        EntrypointError: the set is partial, or contradicts itself.
    """
    size = variables.require("WORLD_SIZE", launcher)
    rank = variables.require("RANK", launcher)
    local_rank = variables.require("LOCAL_RANK", launcher)
    local_size, local_size_source = variables.number("LOCAL_WORLD_SIZE")
    guess = None
    if local_size is None:
        nodes, nodes_source = (1, "WORLD_SIZE") if size == 1 else variables.number(*num_nodes)
        address = variables.get("MASTER_ADDR")
        if nodes and size % nodes == 0:
            local_size, local_size_source = size // nodes, f"WORLD_SIZE / {nodes_source}"
        elif nodes is None and (address is None or is_loopback(address)):
            local_size, local_size_source = size, "WORLD_SIZE"
        else:
            local_size = guess = _guess_local_world_size(size, rank, local_rank)
            local_size_source = "RANK, WORLD_SIZE, LOCAL_RANK"
    ranks = lay_out(
        variables,
        launcher,
        world_size=(size, "WORLD_SIZE"),
        rank=(rank, "RANK"),
        local_rank=(local_rank, "LOCAL_RANK"),
        local_world_size=(local_size, local_size_source),
        node_rank=node_rank,
        num_nodes=num_nodes,
    )
    if guess is not None:
        ranks.warnings.append(
            f"LOCAL_WORLD_SIZE is not set; {guess} is inferred from RANK={rank}, "
            f"WORLD_SIZE={size} and LOCAL_RANK={local_rank}: set it to be sure"
        )
    name_by_job(variables, ranks)
    return ranks


def _guess_local_world_size(size: int, rank: int, local_rank: int) -> int:
    """The largest count d of ranks on nodes that are alike and filled one after the other.

    Then d divides both the world size and the first rank of this node.
    """
    from math import gcd

    guess = gcd(rank - local_rank, size)
    if rank < local_rank or guess <= local_rank:
        raise EntrypointError(
            f"LOCAL_WORLD_SIZE is not set and no count of ranks per node fits RANK={rank}, "
            f"WORLD_SIZE={size}, LOCAL_RANK={local_rank}: set LOCAL_WORLD_SIZE.",
            rank=rank,
        )
    return guess


def name_by_job(variables: Variables, ranks: Ranks) -> None:
    """Name the world, for its port, by the Slurm job alone: its ranks may be in several steps."""
    if ranks.world_size == 1:
        return  # no other rank has to come to the same port
    job, name = variables.number("SLURM_JOB_ID", "SLURM_JOBID")
    if job is not None:
        ranks.port_key = (job, 0)
        ranks.port_key_source = name


def name_by_namespace(variables: Variables, ranks: Ranks) -> None:
    """Name the world by mpirun's own id, which all its ranks share, or else by the Slurm job."""
    namespace, name = variables.first("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    if namespace and ranks.world_size > 1:
        ranks.port_key = (namespace, 0)
        ranks.port_key_source = name
    else:
        name_by_job(variables, ranks)
