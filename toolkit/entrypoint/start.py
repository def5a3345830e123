"""Become the command: warn, check, export, leave a record, exec."""

from __future__ import annotations

import os
import time

from toolkit.entrypoint import codes, processes, run_files
from toolkit.entrypoint.launchers import LAUNCHERS
from toolkit.entrypoint.rendezvous import is_local_target
from toolkit.entrypoint.run_files import NODE, RANK, write_whole
from toolkit.entrypoint.world import EntrypointError, Variables, World, quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

# How many files may be open at once is the first limit that a large run meets: many systems give a
# process 1,024 unless it asks for more. Rank 0 holds a connection to every rank, gloo one to each
# pair, and `toolkit run` a log for every rank.
SPARE = 512  # what torch, NCCL and the user's program open besides
MANY_RANKS = 256  # below, the usual limit of 1,024 open files is enough


def start(
    world: World, command: list[str], say: Callable[[str], None], *, agent_of: int = 0
) -> int:
    """Replace this process by ``command`` in ``world``; returns an exit code only if it cannot.

    With ``agent_of`` the command is no rank but starts so many of them on this node, each through
    an entrypoint of its own: the CPUs are shared among them, and they leave the records.

    Raises:
        EntrypointError: the address or port cannot be used (76), or a variable is wrong (71).
    """
    variables = Variables()
    environ = dict(os.environ)
    run_dir = variables.get("TOOLKIT_RUN_DIR")
    if environ.pop("TOOLKIT_LOG", ""):
        print_to(run_dir, (NODE, world.node_rank) if agent_of else (RANK, world.rank), say)
    for warning in world.warnings:
        # What all ranks would say, rank 0 says; what differs from node to node, a rank of each.
        if world.rank == 0 or (world.local_rank == 0 and warning in world.node_warnings):
            say(f"rank {world.rank}: warning: {warning}.")
    check_image(world, variables)
    if needs_checks(variables):
        from toolkit.entrypoint.checks import check_rendezvous

        world.master_port = check_rendezvous(world, variables)
    if world.world_size >= MANY_RANKS:
        allow_connections(world, say)
    world.export(environ)
    if not variables.get("OMP_NUM_THREADS"):
        threads = count_threads(world, variables, *cpus_here())
        environ["OMP_NUM_THREADS"] = str(max(1, threads // (agent_of or 1)))
    if not variables.get("TORCH_NCCL_ASYNC_ERROR_HANDLING"):
        # torchrun sets it, plain srun does not: without it a rank waits for a dead one for ever.
        environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"
    if run_dir and not agent_of:
        leave_record(run_dir, world, say)
    return execute(command, environ, say, world.rank)


def print_to(run_dir: str | None, task: tuple[str, int], say: Callable[[str], None]) -> None:
    """Let this process, and what it becomes, print straight to its log.

    On its way through srun the end of what a rank prints is lost in half of the runs in which that
    rank dies fast, and all of it where the one who reads is gone.
    """
    log = os.path.join(run_dir or "", run_files.log(task[1], task[0]))
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        for stream in (1, 2):
            os.dup2(file, stream)
    except OSError as error:
        say(f"warning: {log} cannot be written: {error.strerror}. srun passes on what is printed.")


def allow(wanted: int) -> int:
    """Raise this process's limit to ``wanted`` open files, or as near as it may; never lower it.

    Returns:
        How many may be open from now on.
    """
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft if soft >= 0 else wanted
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


def allow_connections(world: World, say: Callable[[str], None]) -> None:
    """Let this rank have a connection to each of the others, as rank 0 needs and gloo in all."""
    allowed = allow(2 * world.world_size + SPARE)
    if world.rank == 0 and allowed < world.world_size + SPARE:
        say(
            f"rank 0: warning: {allowed} files may be open at once on this node (`ulimit -Hn`), "
            f"and rank 0 needs a connection to each of {world.world_size} ranks. Have the hard "
            "limit raised to twice as many or more."
        )


def check_image(world: World, variables: Variables) -> None:
    """Compare the image that this runs in with the one that was asked for, by what it says itself.

    Raises:
        EntrypointError: it is another build, or this runs in no container at all (78).
    """
    expected, found = variables.get("TOOLKIT_EXPECTED_BUILD"), variables.get("TOOLKIT_IMAGE_BUILD")
    if expected in (None, found):
        return
    if found:
        what = f"runs in build {quote(found)} of the image, not in {quote(expected)}"
        why = "A container of that name may be an older one, or the file was not imported again."
    else:
        what = f"does not run in build {quote(expected)} of the image: TOOLKIT_IMAGE_BUILD is unset"
        why = "The cluster may ignore --container-image, or start another image."
    raise EntrypointError(
        f"rank {world.rank} {what} (image.lock asks for it). {why}",
        codes.UNAVAILABLE,
        world.rank,
    )


def needs_checks(variables: Variables) -> bool:
    """Whether the ranks will meet at MASTER_ADDR and MASTER_PORT at all."""
    return not (variables.get("TOOLKIT_INIT_METHOD") or "").startswith("file://")


def cpus_here() -> tuple[int, int]:
    """How many CPUs this process may use, and how many the machine has."""
    machine = os.cpu_count() or 1
    try:
        return len(os.sched_getaffinity(0)), machine
    except AttributeError:  # not Linux
        return machine, machine


def count_threads(world: World, variables: Variables, allowed: int, machine: int) -> int:
    """OMP_NUM_THREADS: the CPUs that this rank has to itself, at least 1.

    Args:
        world: the World.
        variables: SLURM_CPUS_ON_NODE and SLURM_CPUS_PER_TASK are read.
        allowed: CPUs in this process's affinity mask.
        machine: CPUs of the machine.
    """
    local = is_local_target(variables)
    given = variables.number("SLURM_CPUS_ON_NODE")[0]  # the job's on this node
    # These can bind each task to CPUs of its own: then the mask is narrower than the job.
    can_bind = not local and any(one.binds for one in LAUNCHERS if one.name == world.launcher)
    if can_bind and allowed < min(given or machine, machine):
        return allowed
    shared = min(given or allowed, allowed)
    ranks = world.world_size if local and not given else world.local_world_size
    each = variables.number("SLURM_CPUS_PER_TASK")[0] or shared // ranks
    return max(1, min(each, allowed))


def execute(
    command: list[str], environ: dict[str, str], say: Callable[[str], None], rank: int
) -> int:
    """Become ``command``, found as a shell finds it, or return a shell's exit code."""
    program = command[0]
    search = environ.get("PATH", os.defpath)
    paths = [program]
    if "/" not in program:
        folders = search.split(os.pathsep)
        paths = [os.path.join(folder or ".", program) for folder in folders] if program else []
    refused = ""
    for path in paths:
        try:
            os.execve(path, command, environ)  # noqa: S606  no shell in the way of signals
        except (FileNotFoundError, NotADirectoryError):
            # A script whose interpreter is missing is "not found" too.
            if os.path.exists(path):
                refused = refused or f"{path}: the interpreter in its first line was not found"
        except OSError as error:
            refused = refused or f"{path}: {error.strerror}"
    if refused:
        say(f"rank {rank}: the command cannot be executed: {refused}.")
        return codes.NOT_EXECUTABLE
    where = "" if "/" in program else f" in PATH={search}"
    say(f"rank {rank}: the command {program!r} was not found{where}.")
    return codes.NOT_FOUND


def leave_record(run_dir: str, world: World, say: Callable[[str], None]) -> None:
    """Write the record of this rank; a rank without one runs all the same."""
    try:
        write_record(run_dir, world)
    except OSError as error:
        if world.local_rank == 0:
            say(
                f"rank {world.rank}: warning: the record of this rank could not be written "
                f"under TOOLKIT_RUN_DIR={run_dir}: {error.strerror}."
            )


def write_record(run_dir: str, world: World) -> None:
    """Write ``ranks/N.json``: the World, which process this is, and when it started.

    No value of the environment goes into it but those of the World itself.

    Raises:
        OSError: it cannot be written.
    """
    os.makedirs(os.path.join(run_dir, run_files.RANKS), exist_ok=True)
    fields: list[tuple[str, object]] = list(processes.identify(os.getpid()).items())
    fields.append(("started", round(time.time(), 3)))  # seconds since 1970
    fields.append(("job_id", os.environ.get("SLURM_JOB_ID", "")))
    fields.append(("step_id", os.environ.get("SLURM_STEP_ID", "")))
    fields += [(name, getattr(world, name)) for name in World.fields]
    text = "{" + ", ".join(f'"{name}": {as_json(value)}' for name, value in fields) + "}\n"
    write_whole(os.path.join(run_dir, run_files.rank_record(world.rank)), text)


def as_json(value: object) -> str:
    """A number or a text as JSON, in ASCII; importing json costs more than the whole start."""
    if not isinstance(value, str):
        return str(value)
    shown = ""
    for char in value:
        number = ord(char)
        if " " <= char <= "~" and char not in '"\\':
            shown += char
        elif number < 0x10000:
            shown += f"\\u{number:04x}"
        else:
            number -= 0x10000
            shown += f"\\u{0xD800 + (number >> 10):04x}\\u{0xDC00 + (number & 0x3FF):04x}"
    return f'"{shown}"'
