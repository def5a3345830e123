"""MVAPICH's mpirun_rsh, whose marks are MV2_COMM_WORLD_*.

Without these its ranks would each be alone: it need not set PMI_RANK and PMI_SIZE. Source: the
MVAPICH2 user guide, and the variables that Hugging Face's accelerate reads.
"""

from __future__ import annotations

from toolkit.entrypoint.launchers.layout import lay_out, name_by_job

TYPE_CHECKING = False
if TYPE_CHECKING:
    from toolkit.entrypoint.world import Number, Ranks, Variables


def read(variables: Variables, forced: bool) -> Ranks:  # noqa: ARG001, FBT001  as every launcher
    """The ranks that mpirun_rsh gave.

    Raises:
        EntrypointError: the set is partial, or contradicts itself.
    """

    def number(name: str) -> Number:
        name = f"MV2_COMM_WORLD_{name}"
        return variables.require(name, "mvapich"), name

    ranks = lay_out(
        variables,
        "mvapich",
        world_size=number("SIZE"),
        rank=number("RANK"),
        local_rank=number("LOCAL_RANK"),
        local_world_size=number("LOCAL_SIZE"),
    )
    name_by_job(variables, ranks)
    return ranks
