"""What Slurm knows of a job: from squeue, then scontrol, then sacct.

Only plain text is read: the JSON of 22.05 and 24.11 differ in shape, and the fields asked for here
have kept their names since long before.
"""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TIMEOUT_S = 20
FINAL_S = 10.0

#: States in which a job may still run.
WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"})
ACTIVE = WAITING | {
    "CONFIGURING",
    "COMPLETING",
    "RUNNING",
    "RESIZING",
    "SIGNALING",
    "STAGE_OUT",
    "STOPPED",
    "SUSPENDED",
}
#: Reasons for which a job would wait until an administrator changes the cluster.
HOPELESS = frozenset(
    {
        "AccountNotAllowed",
        "BadConstraints",
        "InvalidAccount",
        "InvalidQOS",
        "PartitionConfig",
        "PartitionNodeLimit",
        "PartitionTimeLimit",
        "QOSNotAllowed",
    }
)
#: The exit code that stands for a final state, where no rank's own code is known.
EXIT_CODES = {
    "COMPLETED": 0,
    "TIMEOUT": 124,
    "DEADLINE": 124,
    "CANCELLED": 130,
    "OUT_OF_MEMORY": 137,
    "NODE_FAIL": 75,
    "BOOT_FAIL": 75,
    "PREEMPTED": 75,
    "REVOKED": 75,
}


@dataclass(frozen=True)
class JobStatus:
    """A job as Slurm describes it; ``source`` is the command that knew it.

    ``exit_code`` is the batch script's (128+n for signal n), None while it is not known.
    ``start`` is the (estimated) start as Slurm prints it, None where there is no estimate.
    """

    job_id: str
    state: str
    reason: str | None = None
    start: str | None = None
    nodes: str | None = None
    exit_code: int | None = None
    source: str = "squeue"

    @property
    def active(self) -> bool:
        """Whether the job is queued or running."""
        return self.state in ACTIVE

    @property
    def pending(self) -> bool:
        """Whether the job waits to be started."""
        return self.state in WAITING

    @property
    def final_code(self) -> int:
        """The exit code that this final state stands for."""
        if self.state in EXIT_CODES:
            return EXIT_CODES[self.state]
        return self.exit_code or 1

    def __str__(self) -> str:
        text = f"job {self.job_id} is {self.state.lower()}"
        if self.pending and self.reason:
            text += f" ({self.reason})"
            text += f", expected to start {self.start}" if self.start else ""
        elif self.nodes:
            text += f" on {self.nodes}"
        return text


def status(job_id: str, environ: Mapping[str, str]) -> JobStatus | None:
    """What Slurm knows of a job; None where neither command knows it or can be run."""
    for ask, parse in ((_SQUEUE, parse_squeue), (_SCONTROL, parse_scontrol), (_SACCT, parse_sacct)):
        text = _output([*ask, job_id], environ)
        found = parse(job_id, text) if text else None
        if found is not None:
            return found
    return None


def final_status(job_id: str, environ: Mapping[str, str]) -> JobStatus | None:
    """What became of a job whose srun has ended; Slurm needs a moment to say so."""
    deadline = time.monotonic() + FINAL_S
    while True:
        found = status(job_id, environ)
        if found is None or not found.active or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    if found is not None and found.state == "FAILED" and found.reason == "JobLaunchFailure":
        # 22.05's word for a job of srun's that was preempted: it cannot be requeued.
        return replace(found, state="PREEMPTED")
    return found


_SQUEUE = ("squeue", "--noheader", "--format=%T|%r|%S|%N", "--jobs")
_SCONTROL = ("scontrol", "--oneliner", "show", "job")
_SACCT = (
    "sacct",
    "--noheader",
    "--parsable2",
    "--allocations",
    "--format=State,ExitCode,Reason,Start,NodeList",
    "--jobs",
)


def parse_squeue(job_id: str, text: str) -> JobStatus | None:
    """The job in ``squeue --format=%T|%r|%S|%N``; a finished one is left to the other commands."""
    # An array has a line an element; the one that is furthest along speaks for it.
    lines = [fields for line in text.splitlines() if len(fields := line.split("|")) == 4]
    active = [fields for fields in lines if fields[0] in ACTIVE]
    if not active:
        return None
    state, reason, start, nodes = min(active, key=lambda fields: fields[0] in WAITING)
    return JobStatus(job_id, state, _known(reason), _known(start), _known(nodes))


def parse_scontrol(job_id: str, text: str) -> JobStatus | None:
    """The job in ``scontrol --oneliner show job``."""
    line = text.splitlines()[0] if text.strip() else ""
    fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
    if "JobState" not in fields:
        return None
    return JobStatus(
        job_id,
        _state(fields["JobState"]),
        _known(fields.get("Reason")),
        _known(fields.get("StartTime")),
        _known(fields.get("NodeList")),
        _exit_code(fields.get("ExitCode")),
        "scontrol",
    )


def parse_sacct(job_id: str, text: str) -> JobStatus | None:
    """The job in ``sacct --parsable2 --format=State,ExitCode,Reason,Start,NodeList``."""
    lines = [fields for line in text.splitlines() if len(fields := line.split("|")) == 5]
    if not lines:
        return None
    state, code, reason, start, nodes = lines[-1]
    return JobStatus(
        job_id,
        _state(state),
        _known(reason),
        _known(start),
        _known(nodes),
        _exit_code(code),
        "sacct",
    )


def cancel(job_id: str, environ: Mapping[str, str]) -> str | None:
    """Cancel a job; None where that was accepted, else what scancel said."""
    try:
        ran = subprocess.run(
            ["scancel", job_id], env=dict(environ), capture_output=True, text=True,
            timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if ran.returncode == 0 else ran.stderr.strip()


def _output(command: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """What a command prints; None where it is missing, fails or takes too long."""
    try:
        ran = subprocess.run(
            command,
            env=dict(environ),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ran.stdout if ran.returncode == 0 else None


def _state(text: str) -> str:
    """A state without its remark: sacct writes ``CANCELLED by 1000``."""
    return text.split(maxsplit=1)[0].rstrip("+") if text.split() else "UNKNOWN"


def _known(text: str | None) -> str | None:
    """A field's text, None for Slurm's ways of saying that there is none."""
    return None if text in {None, "", "None", "N/A", "(null)", "Unknown", "None assigned"} else text


def _exit_code(text: str | None) -> int | None:
    """``CODE:SIGNAL`` as a shell would give it."""
    code, colon, number = (text or "").partition(":")
    if not (colon and code.isdigit() and number.isdigit()):
        return None
    return 128 + int(number) if int(number) else int(code)
