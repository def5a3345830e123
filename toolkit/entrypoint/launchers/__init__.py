"""What each launcher says about a process's rank: one module per launcher, in order of trust.

All ranks come from one launcher. Its module is imported only where its marks are seen, since
compiling what is not needed would be most of the start. There ``read(variables, forced)`` returns
None where the launcher did not start this process after all, and raises
:class:`~toolkit.entrypoint.world.EntrypointError` where it did but what it left is partial or
contradicts itself. ``forced`` is True where ``TOOLKIT_RANKS_FROM`` names it: then what is missing
is an error, and variables that disagree with it are ignored.
"""

from __future__ import annotations

from importlib import import_module

from toolkit.entrypoint.world import EntrypointError, is_number, quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from toolkit.entrypoint.world import Ranks, Variables


class Launcher:
    """One row of the table, and the name of the module beside this one.

    Attributes:
        name: as ``TOOLKIT_RANKS_FROM`` and the World call it.
        marks: variables that it sets; one will do, its module says what to make of half a set.
        needs_all: whether all of the marks must be there.
        rank: where it says which rank this is.
        leaves: what must not reach another job: names, or beginnings of names with a ``*``.
        binds: whether it may bind each task to CPUs of its own.
        has_met: whether its own processes met at MASTER_ADDR, and one of them holds MASTER_PORT.
    """

    def __init__(
        self,
        name: str,
        marks: tuple[str, ...],
        *,
        needs_all: bool = False,
        rank: tuple[str, ...] = (),
        leaves: tuple[str, ...] = (),
        binds: bool = False,
        has_met: bool = False,
    ):
        self.name = name
        self.marks = marks
        self.needs_all = needs_all
        self.rank = rank
        self.leaves = leaves
        self.binds = binds
        self.has_met = has_met

    def seen(self, variables: Variables) -> bool:
        """Whether the launcher's marks are there."""
        found = [bool(variables.get(mark)) for mark in self.marks]
        return all(found) if self.needs_all else any(found)


_STEP = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE",
         "SLURM_STEP_NUM_NODES", "SLURM_STEP_NODELIST")  # fmt: skip
# pyxis takes PYXIS_CONTAINER_IMAGE and the like as options, which would put a job into a container.
_SLURM = ("SLURM_*", "SLURMD_*", "SBATCH_*", "SRUN_*", "SALLOC_*", "SPANK_*", "_SLURM_SPANK_*",
          "PYXIS_*")  # fmt: skip
_OMPI = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
         "OMPI_COMM_WORLD_LOCAL_SIZE")  # fmt: skip
_MV2 = ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK")
_PMI = ("PMI_RANK", "PMIX_RANK", "PMI_SIZE")
_HYDRA = ("PMI_*", "PMIX_*", "PMI2_*", "HYDRA_*", "MPI_LOCAL*")
_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_TORCH_TOO = ("LOCAL_WORLD_SIZE", "NODE_RANK")
_TORCHRUN = ("TORCHELASTIC_*", "GROUP_*", "ROLE_*")

#: In order of trust. TORCHELASTIC_RUN_ID alone may have leaked, so torchrun needs all of its marks.
LAUNCHERS = (
    Launcher(
        "torchrun", ("TORCHELASTIC_RUN_ID", *_TORCH), needs_all=True, leaves=_TORCHRUN, has_met=True
    ),
    Launcher("mpi", _OMPI, rank=_OMPI[1:2], leaves=("OMPI_*", "PRTE_*"), binds=True),
    Launcher("mvapich", _MV2, rank=_MV2[1:], leaves=("MV2_COMM_WORLD_*",)),
    Launcher("slurm", _STEP, rank=("SLURM_PROCID",), leaves=_SLURM, binds=True),
    Launcher("pmi", _PMI, rank=_PMI[:2], leaves=_HYDRA, binds=True),
    Launcher("env", _TORCH, rank=("RANK",), leaves=(*_TORCH, *_TORCH_TOO)),
    Launcher("none", (), needs_all=True),
)
OPTION_WORDS = ("srun",)  # what TOOLKIT_LAUNCHER may say that it never said here


def names() -> list[str]:
    """What ``TOOLKIT_RANKS_FROM`` may be."""
    return [launcher.name for launcher in LAUNCHERS]


def is_left_behind(name: str) -> bool:
    """Whether a launcher set the variable ``name`` for a process of its own."""
    return any(
        name.startswith(left[:-1]) if left.endswith("*") else name == left
        for launcher in LAUNCHERS
        for left in launcher.leaves
    )


def forced(variables: Variables) -> tuple[str | None, str]:
    """The launcher that the user names, and the variable: for one release also the old one.

    Raises:
        EntrypointError: there is no such launcher.
    """
    chosen, source = variables.first("TOOLKIT_RANKS_FROM", "TOOLKIT_LAUNCHER")
    if source == "TOOLKIT_LAUNCHER" and chosen in OPTION_WORDS:
        return None, source
    if chosen and chosen not in names():
        raise EntrypointError(
            f"{source}={quote(chosen)} is not a launcher: set TOOLKIT_RANKS_FROM to one of "
            f"{', '.join(names())}, or unset it."
        )
    return chosen, source


def probable_rank(variables: Variables) -> int | None:
    """The rank to name in an error that came before the ranks were known."""
    for name in (name for launcher in LAUNCHERS for name in launcher.rank):
        value = variables.get(name)
        if value and is_number(value):
            return int(value)
    return None


def find_ranks(variables: Variables) -> Ranks:
    """The ranks from the launcher that started this process.

    Raises:
        EntrypointError: the launcher's variables are partial or contradict each other.
    """
    chosen, _ = forced(variables)
    for launcher in LAUNCHERS:
        if chosen == launcher.name or (not chosen and launcher.seen(variables)):
            module = import_module(f"{__name__}.{launcher.name}")
            ranks: Ranks | None = module.read(variables, bool(chosen))
            if ranks:
                ranks.have_met = launcher.has_met
                return ranks
    raise AssertionError("launcher none always answers")
