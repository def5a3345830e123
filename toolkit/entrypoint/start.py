"""Become the command: warn, check, export, leave a record, exec."""

from __future__ import annotations

import os

from toolkit.entrypoint.rendezvous import is_local_target
from toolkit.entrypoint.world import Variables

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from toolkit.entrypoint.world import World

NOT_FOUND = 127  # what a shell ends with
NOT_EXECUTABLE = 126


def start(world: World, command: list[str], say: Callable[[str], None]) -> int:
    """Replace this process by ``command`` in ``world``; returns an exit code only if it cannot.

    Raises:
        EntrypointError: the address or port cannot be used (76), or a variable is wrong (71).
    """
    variables = Variables()
    for warning in world.warnings:
        # What all ranks would say, rank 0 says; what differs from node to node, a rank of each.
        if world.rank == 0 or (world.local_rank == 0 and warning in world.node_warnings):
            say(f"rank {world.rank}: warning: {warning}.")
    exports = world.environ()
    if needs_checks(variables):
        from toolkit.entrypoint.checks import check_rendezvous

        exports["MASTER_PORT"] = str(check_rendezvous(world, variables))
    if not variables.get("OMP_NUM_THREADS"):
        exports["OMP_NUM_THREADS"] = str(count_threads(world, variables))
    if not variables.get("TORCH_NCCL_ASYNC_ERROR_HANDLING"):
        # torchrun sets it, plain srun does not: without it a rank waits for a dead one for ever.
        exports["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"
    run_dir = variables.get("TOOLKIT_RUN_DIR")
    if run_dir:
        from toolkit.entrypoint.record import write_record

        try:
            write_record(run_dir, world)
        except OSError as error:
            if world.local_rank == 0:
                say(
                    f"rank {world.rank}: warning: the record of this rank could not be written "
                    f"under TOOLKIT_RUN_DIR={run_dir}: {error.strerror}."
                )
    os.environ.update(exports)
    return execute(command, say, world.rank)


def needs_checks(variables: Variables) -> bool:
    """Whether the ranks will meet at MASTER_ADDR and MASTER_PORT at all."""
    return not (variables.get("TOOLKIT_INIT_METHOD") or "").startswith("file://")


def count_threads(world: World, variables: Variables) -> int:
    """OMP_NUM_THREADS: the CPUs this rank has to itself, at least 1.

    A mask narrower than the node's share of the job is a binding to this task. Otherwise the
    tasks of the node share it.
    """
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        allowed = os.cpu_count() or 1
    share = min(variables.number("SLURM_CPUS_ON_NODE")[0] or allowed, os.cpu_count() or 1)
    if allowed < share:
        return allowed
    each = variables.number("SLURM_CPUS_PER_TASK")[0]
    if not each:
        whole = is_local_target(variables) and not variables.get("SLURM_CPUS_ON_NODE")
        each = share // (world.world_size if whole else world.local_world_size)
    return max(1, min(each, allowed))


def execute(command: list[str], say: Callable[[str], None], rank: int) -> int:
    """Become ``command``, found as a shell finds it, or return a shell's exit code."""
    program = command[0]
    paths = [program]
    if "/" not in program:
        folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
        paths = [os.path.join(folder or ".", program) for folder in folders] if program else []
    refused = ""
    for path in paths:
        try:
            os.execve(path, command, os.environ)  # noqa: S606  no shell in the way of signals
        except (FileNotFoundError, NotADirectoryError):
            # A script whose interpreter is missing is "not found" too.
            if os.path.exists(path):
                refused = refused or f"{path}: the interpreter in its first line was not found"
        except OSError as error:
            refused = refused or f"{path}: {error.strerror}"
    if refused:
        say(f"rank {rank}: the command cannot be executed: {refused}.")
        return NOT_EXECUTABLE
    where = "" if "/" in program else f" in PATH={os.environ.get('PATH', os.defpath)}"
    say(f"rank {rank}: the command {program!r} was not found{where}.")
    return NOT_FOUND
