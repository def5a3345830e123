"""The options of a job: one table, as the fields of :class:`JobSpec`.

A field's metadata says how the option is typed, what it may be, and what it becomes on Slurm's
command lines. The command line, ``toolkit.toml``, ``TOOLKIT_*``, error messages and OPTIONS.md are
derived from it.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from toolkit.common.secrets import is_secret
from toolkit.entrypoint import run_files
from toolkit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

DEFAULT_WORKLOAD = "sage"
TARGETS = ("local", "slurm", "docker")  #: where a job can run

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})")


class Said(Enum):
    """Where an option is said to Slurm."""

    NOWHERE = auto()
    """It is the toolkit's own."""
    LAYOUT = auto()
    """On every srun, and in the head of a batch script."""
    JOB = auto()
    """Where a job is asked for: a step in one would wait for ever, or be refused."""
    LIMIT = auto()
    """Of jobs and of steps; but a step of a batch script has its job's."""
    HEAD = auto()
    """In the head of a batch script only."""
    PYXIS = auto()
    """On every srun that starts a container; see :mod:`toolkit.slurm.container`."""
    AS_WRITTEN = auto()
    """Its values are arguments by themselves, and stand behind everything else."""


@dataclass(frozen=True)
class Option:
    """One row of the table."""

    key: str
    """Its name in ``toolkit.toml`` (there with dashes), and the field that holds it."""
    kind: type
    """``int``, ``str``, ``bool`` or ``list``: how a user writes it."""
    flags: tuple[str, ...]
    """On the command line; none for an option of files only."""
    help: str
    batch: bool
    """Whether only a batch job has it."""
    variable: str | None
    """The variable that sets it."""
    read: Callable[[Any, str], Any] | None
    """From what the user wrote, and where, to what the field holds; raises UsageError."""
    said: Said
    slurm: str
    """Slurm's or pyxis's name for it, without dashes."""
    say: Callable[[JobSpec], Any] | None
    """What is said of it where that is not just the field's value."""
    helper: bool
    """Whether a job beside the training, such as an import, is asked for with it too."""
    default: Any

    def typed(self, value: Any) -> str:
        """The option as it is typed, as messages name it; the values of a list are not shown."""
        flag = next((flag for flag in self.flags if flag.startswith("--")), f"--{self.slurm}")
        yes, _, no = flag.partition("/")
        if self.kind is bool:
            return yes if value else no
        return yes if self.kind is list else f"{yes} {value}"

    def words(self, spec: JobSpec) -> list[str]:
        """What Slurm is told: ``--name=value``, a bare ``--name``, or nothing."""
        value = self.say(spec) if self.say else getattr(spec, self.key)
        if value is False and self.default is True:
            return [f"--no-{self.slurm}"]
        if value is None or value is False or value in {"", ()}:
            return []
        return [f"--{self.slurm}"] if value is True else [f"--{self.slurm}={value}"]


def option(
    *flags: str,
    help: str,  # noqa: A002 - as Typer calls it
    default: Any = None,
    kind: type | None = None,
    batch: bool = False,
    typed: bool = True,
    variable: bool = True,
    read: Callable[[Any, str], Any] | None = None,
    said: Said = Said.NOWHERE,
    slurm: str = "",
    say: Callable[[JobSpec], Any] | None = None,
    helper: bool = False,
) -> Any:
    """A field of :class:`JobSpec` that is an option; the arguments are :class:`Option`'s.

    What is not given follows from the field: ``flags`` and ``slurm`` from its name, ``kind`` from
    its type. ``typed`` is False for an option of files and variables only.
    """
    return dataclasses.field(default=default, metadata={"option": locals()})


@cache
def table() -> dict[str, Option]:
    """Every option by its key, in the order in which they are shown and said."""
    hints = get_type_hints(JobSpec)
    found = {}
    for field in dataclasses.fields(JobSpec):
        if "option" not in field.metadata:
            continue
        given = dict(field.metadata["option"])
        name = field.name.replace("_", "-")
        kind = given["kind"] or _kind(hints[field.name])
        negative = f"/--no-{name}" if kind is bool else ""
        flags = given["flags"] or (f"--{name}{negative}",)
        given |= {
            "key": field.name,
            "kind": kind,
            "flags": flags if given.pop("typed") else (),
            "variable": f"TOOLKIT_{field.name.upper()}" if given["variable"] else None,
            "slurm": given["slurm"] or name,
        }
        found[field.name] = Option(**given)
    return found


def _kind(hint: Any) -> type:
    """How a user writes what a field of this type holds."""
    kinds = [kind for kind in (get_args(hint) or (hint,)) if kind is not NoneType]
    if get_origin(hint) is tuple:
        return list
    kind: type = kinds[0]
    return kind


def said(spec: JobSpec, *where: Said) -> list[str]:
    """What Slurm is told of a job, in the order of ``where``."""
    return [
        word
        for place in where
        for one in table().values()
        if one.said is place
        for word in one.words(spec)
    ]


def count(least: int) -> Callable[[int, str], int]:
    """Read a whole number of at least ``least``."""

    def read(value: int, source: str) -> int:
        if value < least:
            raise UsageError(f"{source}: too few; must be {least} or more.")
        return value

    return read


def one_of(*known: str) -> Callable[[str, str], str]:
    """Read one of the known words."""

    def read(value: str, source: str) -> str:
        if value not in known:
            choice = (
                f"{', '.join(known[:-1])} or {known[-1]}" if len(known) > 2 else " or ".join(known)
            )
            raise UsageError(f"{source}: must be {choice}.")
        return value

    return read


def seconds(text: str, source: str) -> int:
    """Read a time limit in Slurm's forms: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise UsageError(f"{source}: not a time limit. Write minutes, H:M:S or D-H:M:S.")
    parts = [int(part) for part in match["parts"].split(":")]
    if match["days"] is not None:
        hours, minutes, rest = (*parts, 0, 0)[:3]
        total = ((int(match["days"]) * 24 + hours) * 60 + minutes) * 60 + rest
    elif len(parts) == 3:
        total = (parts[0] * 60 + parts[1]) * 60 + parts[2]
    else:
        minutes, rest = (*parts, 0)[:2]
        total = minutes * 60 + rest
    if total == 0:
        raise UsageError(f"{source}: no time at all. Give at least one second (0:01).")
    return total


def slurm_time(total: int | None) -> str | None:
    """Write a time limit in Slurm's form, ``D-HH:MM:SS``."""
    if total is None:
        return None
    minutes, second = divmod(total, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}-{hour:02}:{minute:02}:{second:02}"


def variables(items: list[str], source: str = "--env") -> tuple[tuple[str, str | None], ...]:
    """Read ``NAME=VALUE``, or ``NAME`` for a value that is taken when the job starts.

    Of two values for one name the last one counts, and a value counts more than a bare name.
    """
    source = source.partition(" = ")[0]  # the values may be secrets
    found: dict[str, str | None] = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not _VARIABLE.fullmatch(name):
            shown = name if equals else item
            msg = f"{source}: {shown!r} is not a variable's name. Write NAME=VALUE or NAME."
            raise UsageError(msg)
        if "\0" in value:
            raise UsageError(
                f"{source}: the value of {name} holds a NUL byte, which no variable can."
            )
        if equals or name not in found:
            found[name] = value if equals else None
    return tuple(found.items())


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """What a job is asked to be, in Slurm's and pyxis's own words; also the table of options.

    ``command`` is the user's; it is empty where ``workload`` names a built-in one.
    """

    command: tuple[str, ...] = ()
    workload: str | None = None
    workload_args: tuple[str, ...] = ()

    nodes: int = option(
        "-N", "--nodes", default=1, read=count(1), said=Said.LAYOUT,
        help="Number of nodes [default: 1].",
    )  # fmt: skip
    ntasks: int | None = option(
        "-n", "--ntasks", read=count(1), said=Said.LAYOUT,
        say=lambda spec: spec.nodes * spec.tasks_per_node,
        help="Ranks in all, spread evenly over the nodes.",
    )  # fmt: skip
    ntasks_per_node: int = option(
        default=1, read=count(1), said=Said.LAYOUT, say=lambda spec: spec.tasks_per_node,
        help="Ranks on each node [default: --gpus-per-node, else 1].",
    )  # fmt: skip
    gpus_per_node: int | None = option(
        read=count(0), said=Said.LAYOUT, help="GPUs on each node.",
    )  # fmt: skip
    gpus_per_task: int | None = option(
        read=count(0), help="GPUs of each rank; asked for as --gpus-per-node."
    )  # fmt: skip
    cpus_per_task: int | None = option(
        "-c", "--cpus-per-task", read=count(1), said=Said.LAYOUT,
        say=lambda spec: spec.task_cpus, help="CPUs of each rank.",
    )  # fmt: skip
    mem: str | None = option(said=Said.LIMIT, help="Memory on each node, such as 64G.")
    partition: str | None = option(
        "-p", "--partition", said=Said.JOB, helper=True, help="Partition."
    )
    account: str | None = option(
        "-A", "--account", said=Said.JOB, helper=True, help="Account to charge."
    )
    qos: str | None = option("-q", "--qos", said=Said.JOB, helper=True, help="Quality of service.")
    time: int | None = option(
        "-t", "--time", kind=str, read=seconds, said=Said.LIMIT,
        say=lambda spec: slurm_time(spec.time), help="Time limit: minutes, H:M:S or D-H:M:S.",
    )  # fmt: skip
    constraint: str | None = option(
        "-C", "--constraint", said=Said.JOB, helper=True, help="Features that the nodes must have."
    )
    reservation: str | None = option(
        said=Said.JOB, helper=True, help="Reservation whose nodes are used."
    )
    grace: int = option(
        default=30, read=count(0),
        help="Seconds that ranks get to save when the run is cancelled or reaches its limit"
        " [default: 30].",
    )  # fmt: skip
    job_name: str = option(
        "-J", "--job-name", default="job", said=Said.LIMIT,
        help="Name of the job [default: the workload's].",
    )  # fmt: skip
    launcher: str = option(
        default="srun", read=one_of("srun", "torchrun"),
        help="srun: one task a rank; torchrun: one task a node [default: srun].",
    )  # fmt: skip
    rendezvous: str = option(
        default="port", read=one_of("port", "file"),
        help="Ranks meet at a port, or through a file [default: port].",
    )  # fmt: skip
    container_image: str | None = option(
        "--container-image", "--image", said=Said.PYXIS, help="Image reference or .sqsh file."
    )
    container_mounts: tuple[str, ...] = option(
        "--container-mounts", "--mount", default=(), said=Said.PYXIS,
        help="SRC:DST[:FLAGS]; repeatable.",
    )  # fmt: skip
    container_workdir: str | None = option(
        said=Said.PYXIS, help="Where the command starts in the container."
    )
    container_name: str | None = option(
        said=Said.PYXIS, help="Keep the container under this name (it outlives the job)."
    )
    container_mount_home: bool = option(
        default=False, said=Said.PYXIS, help="Mount the home directory [default: no]."
    )
    container_writable: bool = option(
        default=False, said=Said.PYXIS,
        help="Let the job write into the container's root [default: no].",
    )  # fmt: skip
    import_image: bool = option(
        "--import/--no-import", "--import-image/--no-import-image", default=False,
        help="Import the image first, as toolkit import does [default: no].",
    )  # fmt: skip
    images: str | None = option(
        help="Folder of imported images [default: TOOLKIT_IMAGES, else images]."
    )
    pyxis_flags: tuple[str, ...] = option(
        typed=False,
        default=(),
        help="The flags that this cluster's pyxis knows (toolkit doctor --save).",
    )
    env: tuple[tuple[str, str | None], ...] = option(
        default=(), kind=list, variable=False, read=variables,
        help="NAME=VALUE; or NAME, which never prints the value; repeatable.",
    )  # fmt: skip
    srun_arg: tuple[str, ...] = option(
        default=(), said=Said.AS_WRITTEN, help="One more argument for srun; repeatable."
    )
    on: str = option(
        default="auto", read=one_of("auto", *TARGETS),
        help="auto, local, slurm or docker [default: auto].",
    )  # fmt: skip
    runs: str | None = option(help="Folder for run directories [default: TOOLKIT_RUNS, else runs].")

    requeue: bool = option(
        default=True, batch=True, said=Said.HEAD,
        help="Run again when preempted, when a node is lost, and when the job ends with 75"
        " [default: yes].",
    )  # fmt: skip
    signal: str | None = option(
        batch=True, said=Said.HEAD,
        help="SIGNAL@SECONDS: sent to every rank so long before the time limit"
        " [default: TERM@120 with --time of 10 minutes or more].",
    )  # fmt: skip
    array: str | None = option(
        batch=True, said=Said.HEAD,
        help="Task ids of a job array, such as 0-9%4; a run directory each.",
    )  # fmt: skip
    dependency: str | None = option(
        batch=True, said=Said.HEAD, help="Wait for jobs, such as afterok:1234."
    )
    hold: bool = option(
        default=False, batch=True, said=Said.HEAD,
        help="Submit the job held (scontrol release starts it).",
    )  # fmt: skip
    sbatch_arg: tuple[str, ...] = option(
        default=(),
        batch=True,
        said=Said.AS_WRITTEN,
        help="One more argument for sbatch; repeatable.",
    )

    @property
    def world_size(self) -> int:
        """The number of ranks on all nodes."""
        return self.nodes * self.ntasks_per_node

    @property
    def task(self) -> str:
        """What a task of Slurm's is: a rank, or a node whose torchrun starts the ranks."""
        return run_files.NODE if self.launcher == "torchrun" else run_files.RANK

    @property
    def tasks_per_node(self) -> int:
        return 1 if self.task == run_files.NODE else self.ntasks_per_node

    @property
    def task_cpus(self) -> int | None:
        """CPUs of each of Slurm's tasks; a torchrun's has those of all its ranks, one at least."""
        if self.task == run_files.NODE:
            return (self.cpus_per_task or 1) * self.ntasks_per_node
        return self.cpus_per_task

    @property
    def env_values(self) -> dict[str, str]:
        """What ``--env NAME=VALUE`` sets."""
        return {name: value for name, value in self.env if value is not None}

    @property
    def env_names(self) -> tuple[str, ...]:
        """What ``--env NAME`` passes on."""
        return tuple(name for name, value in self.env if value is None)

    def as_dict(self) -> dict[str, Any]:
        """The job as ``run.json`` keeps it: what was set, secrets by name only."""
        default = JobSpec()
        shown = {key: value for key, value in vars(self).items() if value != getattr(default, key)}
        shown |= {"nodes": self.nodes, "ntasks_per_node": self.ntasks_per_node}
        if self.env:
            shown["env"] = {
                name: None if value is None or is_secret(name, value) else value
                for name, value in self.env
            }
        return shown
