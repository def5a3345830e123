"""The launcher torchrun (torch.distributed.elastic), whose mark is TORCHELASTIC_RUN_ID.

It stands above a Slurm step because ``srun torchrun`` leaves each worker the step of its agent.
GROUP_RANK is the agent's, that is the node's, rank.
"""

from __future__ import annotations

from toolkit.entrypoint.launchers.layout import lay_out_torch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from toolkit.entrypoint.world import Ranks, Variables


def read(variables: Variables, forced: bool) -> Ranks:  # noqa: ARG001, FBT001  as every launcher
    """The worker's ranks.

    Raises:
        EntrypointError: the set is partial (where forced) or contradicts itself.
    """
    return lay_out_torch(
        variables,
        "torchrun",
        node_rank=("GROUP_RANK", "NODE_RANK"),
        num_nodes=("GROUP_WORLD_SIZE", "NUM_NODES", "NNODES"),
    )
