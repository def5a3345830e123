"""What each launcher says about a process's rank: one module per launcher, in order of trust.

All ranks come from one launcher. Its module is imported only where its marks are seen, since
compiling what is not needed would be most of the start. There ``read(variables, forced)`` returns
None where the launcher did not start this process after all, and raises
:class:`~toolkit.entrypoint.world.EntrypointError` where it did but what it left is partial or
contradicts itself. ``forced`` is True where ``TOOLKIT_LAUNCHER`` names it: then what is missing is
an error, and variables that disagree with it are ignored.
"""

from __future__ import annotations

from importlib import import_module

from toolkit.entrypoint.world import EntrypointError, quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from toolkit.entrypoint.world import Ranks, Variables

# torchrun needs all of its marks: TORCHELASTIC_RUN_ID alone may have leaked. Of the others one
# will do: their modules say what to make of half a set.
ORDER = (
    ("torchrun", all, ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK")),
    (
        "mpi",
        any,
        (
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
    ),
    (
        "slurm",
        any,
        (
            "SLURM_STEP_ID",
            "SLURM_STEPID",
            "SLURM_STEP_NUM_TASKS",
            "SLURM_STEP_TASKS_PER_NODE",
            "SLURM_STEP_NUM_NODES",
            "SLURM_STEP_NODELIST",
        ),
    ),
    ("pmi", any, ("PMI_RANK", "PMIX_RANK", "PMI_SIZE")),
    ("env", any, ("WORLD_SIZE", "RANK", "LOCAL_RANK")),
    ("none", all, ()),
)


def find_ranks(variables: Variables) -> Ranks:
    """The ranks from the launcher that started this process.

    Raises:
        EntrypointError: the launcher's variables are partial or contradict each other.
    """
    chosen = variables.get("TOOLKIT_LAUNCHER")
    if chosen and chosen not in (name for name, _, _ in ORDER):
        raise EntrypointError(
            f"TOOLKIT_LAUNCHER={quote(chosen)} is not a launcher: choose one of "
            f"{', '.join(name for name, _, _ in ORDER)}, or unset it."
        )
    for name, enough, marks in ORDER:
        if chosen == name or (not chosen and enough(variables.get(mark) for mark in marks)):
            ranks: Ranks | None = import_module(f"{__name__}.{name}").read(variables, bool(chosen))
            if ranks:
                return ranks
    raise AssertionError("launcher none always answers")
