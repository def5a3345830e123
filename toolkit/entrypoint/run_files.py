"""What stands in a run directory, by name; the paths here are relative to it.

::

    runs/NAME-TIME/
        run.json         what runs where: the job, the target, the code's revision
        script.sh        what was executed, as --dry-run prints it; batch.sh is a batch job's script
        entrypoint.pyz   the entrypoint, for any Python 3.8 or newer in any image
        lib/             the built-in workloads' code
        logs/rank-N.log  what each rank printed; under torchrun logs/node-N.log, what each node did
        logs/srun.log    what srun, slurmstepd and a batch script said; and behind its number what a
                         task said that had no log of its own yet
        logs/toolkit.log what the toolkit itself said while it watched the run
        ranks/N.json     written by the entrypoint as it starts the rank's command
        metrics.jsonl    what the workload reported, a line a time
        result.json      how it ended
        cancelled.json   who cancelled it
        before-restart-N/ what an earlier attempt of a requeued job left of all this
"""

from __future__ import annotations

import os

#: Where the run directory is in every container. No host has such a path, so a site that ignores
#: --container-image fails at once instead of running outside of the image.
IN_CONTAINER = "/toolkit-run"

RECORD = "run.json"
RESULT = "result.json"
METRICS = "metrics.jsonl"
SCRIPT = "script.sh"
BATCH_SCRIPT = "batch.sh"
ENTRYPOINT = "entrypoint.pyz"
LIB = "lib"
WORKLOADS = LIB + "/workloads"  # a folder that Python can run
LOGS = "logs"
RANKS = "ranks"
RENDEZVOUS = "rendezvous"  # a file: each attempt has one of its own behind this name
SRUN_LOG = LOGS + "/srun.log"
NOTES = LOGS + "/toolkit.log"
CANCELLED = "cancelled.json"
ELEMENT_LOG = LOGS + "/srun-{}.log"  # what SRUN_LOG is to an array's element, in the array's folder
BEFORE_RESTART = "before-restart-"  # and the number of the restart

#: What has a log of its own: a rank, or a node whose torchrun starts the ranks.
RANK = "rank"
NODE = "node"


def log(number: int | str, task: str = RANK) -> str:
    """A task's log; in place of the number may stand ``%t`` for Slurm, or ``*`` for a shell."""
    return f"{LOGS}/{task}-{number}.log"


def rank_record(rank: int) -> str:
    """The record that the entrypoint leaves of a rank."""
    return f"{RANKS}/{rank}.json"


def write_whole(path: str | os.PathLike[str], data: bytes | str, mode: int | None = None) -> None:
    """Write a file under a name of its own beside ``path`` and rename it: whole, or not at all.

    Args:
        path: the file, replaced where it is there.
        data: its content, text in UTF-8.
        mode: its permissions, whatever the umask says; None for what the umask leaves.

    Raises:
        OSError: it cannot be written; nothing is left then.
    """
    folder, name = os.path.split(os.fspath(path))
    # A name that no other process has, on this node or another one; it begins with a dot, and does
    # not end as the file does, so that nobody who looks for such files finds half of one.
    scratch = os.path.join(folder, f".{name}.{os.urandom(6).hex()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(scratch, flags, 0o666 if mode is None else mode & 0o600)
    try:
        try:
            left = memoryview(data if isinstance(data, bytes) else data.encode("utf-8"))
            while left:
                left = left[os.write(descriptor, left) :]
            if mode is not None:
                os.fchmod(descriptor, mode)
        finally:
            os.close(descriptor)
        os.replace(scratch, path)
    except BaseException:
        os.unlink(scratch)
        raise
