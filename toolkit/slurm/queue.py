"""What Slurm knows of a job: from squeue, then scontrol, then sacct.

Only plain text is read: the JSON of 22.05 and 24.11 differ in shape, and the fields asked for here
have kept their names since long before.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from toolkit.common.capture import capture
from toolkit.entrypoint import codes
from toolkit.slurm import probe

if TYPE_CHECKING:
    from collections.abc import Mapping

TIMEOUT_S = 20
MOST_LOOKED_AT = 10
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
        "DependencyNeverSatisfied",
        "InvalidAccount",
        "InvalidQOS",
        "PartitionConfig",
        "PartitionNodeLimit",
        "PartitionTimeLimit",
        "QOSNotAllowed",
    }
)


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
        return self.state in WAITING

    @property
    def final_code(self) -> int:
        """The exit code that this final state stands for."""
        known = codes.OF_STATE.get(self.state)
        return (self.exit_code or 1) if known is None else known

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
        asked = capture([*ask, job_id], TIMEOUT_S, environ)
        found = parse(job_id, asked.stdout) if asked.ok else None
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


_QUEUED = re.compile(r"srun: job (\d+) queued and waiting")
_ALLOCATED = re.compile(r"srun: job (\d+) has been allocated")
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


def stale(job_id: str, environ: Mapping[str, str]) -> str:
    """Why a job id in the environment is that of no running job; empty where it may be one."""
    job = status(job_id, environ)
    if job is not None:
        why = "" if job.state == "RUNNING" else f"is {job.state.lower()}"
    else:
        why = "" if probe.unreachable(environ) else "is unknown to Slurm"
    return why and f"SLURM_JOB_ID={job_id} of this shell {why}: this makes a job of its own"


def cancel(job_id: str, environ: Mapping[str, str]) -> str | None:
    """Cancel a job or step; None where that was accepted, else what scancel said."""
    asked = capture(["scancel", job_id], TIMEOUT_S, environ)
    return None if asked.ok else asked.said()


def signal(job_id: str, name: str, environ: Mapping[str, str]) -> None:
    """Send a signal to the tasks of a job or step, but not to a batch script."""
    capture(["scancel", f"--signal={name}", job_id], TIMEOUT_S, environ)


def waiting_for(line: str) -> tuple[str | None, str | None]:
    """The job that srun says it waits for, and the one that it says it got; each None where not."""
    queued, got = _QUEUED.search(line), _ALLOCATED.search(line)
    return (queued[1] if queued else None), (got[1] if got else None)


def job_of_session(name: str, session: str, environ: Mapping[str, str]) -> str | None:
    """The job that was asked for from a session, ``HOST:PID``; srun does not say which it got.

    Args:
        name: the job's name, by which few are looked at.
        session: the host, and the process that leads the session.
        environ: for Slurm's commands.
    """
    words = ["squeue", "--me", "--noheader", "--format=%i", f"--name={name}"]
    asked = capture(words, TIMEOUT_S, environ)
    for job_id in asked.stdout.split()[:MOST_LOOKED_AT] if asked.ok else []:
        shown = capture([*_SCONTROL, job_id], TIMEOUT_S, environ)
        if f" AllocNode:Sid={session} " in f"{shown.stdout} ":
            return job_id
    return None


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
    return codes.SIGNAL + int(number) if int(number) else int(code)
