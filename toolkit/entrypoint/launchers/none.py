"""No launcher: one process, and a warning where it sits in an allocation that asks for more."""

from __future__ import annotations

from toolkit.entrypoint.world import Ranks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from toolkit.entrypoint.world import Variables


def read(variables: Variables, forced: bool) -> Ranks:  # noqa: FBT001  as every launcher
    """Rank 0 of 1.

    Raises:
        EntrypointError: the allocation's own variables are malformed.
    """
    ranks = Ranks(
        "none",
        world_size=(1, "no launcher"),
        rank=(0, "no launcher"),
        local_rank=(0, "no launcher"),
        local_world_size=(1, "no launcher"),
        node_rank=(0, "no launcher"),
        num_nodes=(1, "no launcher"),
    )
    tasks, name = (None, "") if forced else tasks_asked_for(variables)
    if tasks is not None and tasks > 1:
        ranks.warnings.append(
            f"the allocation asks for {tasks} tasks (from {name}) but this process was not "
            "started by srun, so it runs alone; start it with srun, or set TOOLKIT_RANKS_FROM=none "
            "if one process is meant"
        )
    return ranks


def tasks_asked_for(variables: Variables) -> tuple[int | None, str]:
    """The number of tasks the Slurm allocation was made for, and the variable that says so."""
    tasks, name = variables.number("SLURM_NTASKS", "SLURM_NPROCS")
    if tasks is not None:
        return tasks, name
    layout, name = variables.first("SLURM_TASKS_PER_NODE")
    if layout:
        from toolkit.entrypoint.hostlist import tasks_per_node

        return sum(tasks_per_node(layout, name)), name
    return variables.number("SLURM_NNODES", "SLURM_JOB_NUM_NODES")
