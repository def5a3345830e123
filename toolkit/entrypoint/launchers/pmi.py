"""PMI or PMIx alone: MPICH's and Intel's mpiexec (hydra), Cray's PALS, MVAPICH.

All give PMI_RANK and PMI_SIZE, and each has its own names for the place on the node. PMIx gives a
rank without a size, which is not enough.
"""

from __future__ import annotations

from toolkit.entrypoint.launchers.layout import lay_out, name_by_namespace
from toolkit.entrypoint.world import EntrypointError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from toolkit.entrypoint.world import Number, Ranks, Variables

LOCAL_RANK = ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK")
LOCAL_SIZE = ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")


def read(variables: Variables, forced: bool) -> Ranks | None:  # noqa: FBT001  as every launcher
    """The ranks that mpiexec gave, None where PMI's variables are only a Slurm batch step's.

    Raises:
        EntrypointError: the set is partial or contradicts itself.
    """
    rank, rank_name = variables.number("PMI_RANK", "PMIX_RANK")
    size, size_name = variables.number("PMI_SIZE")
    if not forced and _not_meant(variables, rank, size):
        return None
    if rank is None:
        rank = variables.require("PMI_RANK", "pmi")
    if size is None:
        raise EntrypointError(
            f"{rank_name}={rank} is a rank without a size (PMI_SIZE is not set): set RANK, "
            "WORLD_SIZE and LOCAL_RANK as well, or TOOLKIT_RANKS_FROM=none to run alone.",
            rank=rank,
        )
    ranks = lay_out(
        variables,
        "pmi",
        world_size=(size, size_name),
        rank=(rank, rank_name),
        local_rank=_local(variables, LOCAL_RANK, 0, size),
        local_world_size=_local(variables, LOCAL_SIZE, 1, size),
    )
    name_by_namespace(variables, ranks)
    return ranks


def _not_meant(variables: Variables, rank: int | None, size: int | None) -> bool:
    """Whether PMI's variables tell nothing here, or nothing that others do not tell better."""
    if rank == 0 and size in (None, 1) and variables.get("SLURM_PROCID") == "0":
        return True  # a batch or interactive step's own: a task's step was read before
    # A rank without a size, completed by hand.
    complete = all(variables.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    return complete and size is None and rank == variables.number("RANK")[0]


def _local(variables: Variables, names: tuple[str, ...], alone: int, size: int) -> Number:
    number, name = variables.number(*names)
    if number is None and size == 1:
        return alone, "PMI_SIZE"
    if number is None:
        raise EntrypointError(
            f"PMI_SIZE={size}, but none of {', '.join(names)} is set, so this rank's place on its "
            f"node is unknown: set {name}."
        )
    return number, name
