"""Open MPI's mpirun, whose marks are OMPI_COMM_WORLD_*.

It stands above a Slurm step because mpirun in an allocation starts its daemons by srun, and each
rank then sees its daemon's step, complete but wrong. OMPI_MCA_*, PRTE_* and HYDRA_* are no sign of
it: Slurm 24.11 sets them in every task. OMPI_COMM_WORLD_NODE_RANK is a rank among the processes of
a node, not the node's.
"""

from __future__ import annotations

from toolkit.entrypoint.launchers.layout import lay_out, name_by_namespace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from toolkit.entrypoint.world import Number, Ranks, Variables


def read(variables: Variables, forced: bool) -> Ranks:  # noqa: ARG001, FBT001  as every launcher
    """The ranks that mpirun gave.

    Raises:
        EntrypointError: the set is partial, even beside a Slurm step, whose ranks would be
            duplicates; or it contradicts itself.
    """

    def number(name: str) -> Number:
        name = f"OMPI_COMM_WORLD_{name}"
        return variables.require(name, "mpi"), name

    ranks = lay_out(
        variables,
        "mpi",
        world_size=number("SIZE"),
        rank=number("RANK"),
        local_rank=number("LOCAL_RANK"),
        local_world_size=number("LOCAL_SIZE"),
    )
    name_by_namespace(variables, ranks)
    return ranks
