"""Runs seen later: what state one is in, how it ended, and cancelling it.

A run's own record comes first; where a job was ended before it could write one, it is rebuilt from
what Slurm knows and from the ranks' logs.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

from toolkit.entrypoint import codes, finish, processes
from toolkit.errors import UnavailableError, UsageError
from toolkit.slurm import queue

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping

    from toolkit.run_dir import RunDir


def status(run: RunDir, environ: Mapping[str, str]) -> dict[str, Any]:
    """What is known of a run.

    Returns:
        ``run``, ``target``, ``job_id``, ``state`` (Slurm's word in lower case; ``unknown`` where
        nothing knows it), ``reason`` and ``start`` of a pending job, ``exit_code``, ``failure``,
        ``metrics``, and ``elements``: the same of each element of an array. What does not apply is
        None or empty. An array's own state and exit code are those of the first element that
        runs, waits or has failed.
    """
    record = run.record()
    job_id = record.get("job_id")
    shown: dict[str, Any] = {
        "run": run.path.name,
        "run_dir": str(run.path),
        "target": record.get("target"),
        "job_id": job_id,
        "state": "unknown",
        "reason": None,
        "start": None,
        "exit_code": None,
        "failure": None,
        "metrics": finish.metrics(str(run.path)),
        "elements": [status(element, environ) for element in run.elements()],
    }
    result = run.result()
    if shown["elements"] and result is None:
        telling = min(shown["elements"], key=_importance)
        shown.update({key: telling[key] for key in ("state", "reason", "start", "exit_code")})
        return shown
    # A job that failed and waits again was requeued; its script sets the old result aside.
    ask = result is None or result["exit_code"]
    job = queue.status(job_id, environ) if job_id and ask else None
    if job is not None and job.active and (result is None or job.pending):
        shown.update(state=job.state.lower(), reason=job.reason, start=job.start)
        return shown
    if job is not None and result is None:
        result = rebuild(run, job)
    if result is not None:
        code = result["exit_code"]
        shown.update(
            state="failed" if code else "completed", exit_code=code, failure=result["failure"]
        )
    elif processes.lives(record):
        shown["state"] = "running"
    return shown


def _importance(shown: Mapping[str, Any]) -> int:
    """Which element speaks for its array: one that goes on, then one that failed."""
    return 0 if shown["exit_code"] is None else 1 if shown["exit_code"] else 2


def rebuild(run: RunDir, job: queue.JobStatus) -> dict[str, Any]:
    """Write the result of a job that could not write its own, and return it."""
    path = str(run.path)
    result = run.result()  # the batch script may have written it while Slurm was asked
    if result is not None:
        return result
    code = job.final_code
    failed = finish.judge(path, code)
    if failed is not None and (failed["rank"] is None or job.state in codes.OF_STATE):
        # Slurm's own word for why it ended a job is better than the rank that died of it.
        failed = finish.failure("slurm", f"ended as {job.state.lower()}", code)
    records = finish.rank_records(path)
    result = finish.result(
        path,
        failed["exit_code"] if failed else 0,
        failed,
        started=min((record["started"] for record in records), default=None),
        ended=time.time(),
        hosts=finish.hosts(records),
    )
    finish.write_json(str(run.result_file), result)
    return result


def cancel(run: RunDir, environ: Mapping[str, str]) -> str:
    """Cancel a run; what was done, in a sentence.

    Raises:
        UsageError: if the run has ended.
        UnavailableError: if it runs where it cannot be reached from here.
    """
    record = run.record()
    if run.result() is not None:
        raise UsageError(f"{run.path.name} has ended already; there is nothing to cancel.")
    if job_id := record.get("job_id"):
        refused = queue.cancel(job_id, environ)
        if refused:
            raise UnavailableError(f"job {job_id} could not be cancelled: {refused}")
        return f"asked Slurm to cancel job {job_id}"
    if processes.lives(record):
        os.kill(record["pid"], signal.SIGTERM)
        return f"sent SIGTERM to process {record['pid']}"
    msg = (
        f"{run.path.name} was started on {record.get('host')} by process {record.get('pid')}, which"
        " does not run here. Cancel it there."
    )
    raise UnavailableError(msg)


# ---- logs

#: How often a log that is followed is looked at, and how often Slurm is asked for the job's state.
FOLLOW_S = 0.2
ASK_S = 5.0
#: Logs opened in a second at most: each costs the shared file system's metadata server a request,
#: and a mere look at a file's size may be answered from an old one.
OPENS_PER_SECOND = 500


class Logs:
    """What the logs of a run, or of one of its ranks, have gained since the last look."""

    def __init__(self, run: RunDir, rank: int | None = None) -> None:
        """Nothing is read yet.

        Raises:
            UsageError: if the run has no such rank, or is an array, which has no logs of its own.
        """
        if elements := run.elements():
            names = ", ".join(element.path.name for element in elements[:8])
            msg = f"{run.path.name} is an array; name one of its elements: {names}."
            raise UsageError(msg)
        logs = run.logs()
        if rank is not None:
            if rank >= len(logs):
                msg = f"--rank {rank}: {run.path.name} has the logs of {len(logs)} {run.task_is}s."
                raise UsageError(msg)
            logs = [logs[rank]]
        self._offsets = dict.fromkeys(logs, 0)
        self.pause = pause(len(logs))

    def lines(self, *, ended: bool = False) -> Iterator[str]:
        """The whole lines that are new, behind their rank; after the end half a line too."""
        for path, offset in self._offsets.items():
            try:
                with path.open("rb") as log:
                    log.seek(offset)
                    text = log.read()
            except FileNotFoundError:
                continue
            if not ended:
                text = text[: text.rfind(b"\n") + 1]
            self._offsets[path] += len(text)
            who = path.stem.replace("-", " ")
            for line in text.decode(errors="replace").splitlines():
                yield f"[{who}] {line}"


def pause(logs: int) -> float:
    """Seconds between two looks at so many logs."""
    return max(FOLLOW_S, logs / OPENS_PER_SECOND)


def follow(
    run: RunDir, logs: Logs, environ: Mapping[str, str], say: Callable[[str], None]
) -> Generator[str, None, int]:
    """The lines of a run until it ends; returns its exit code, 1 where nothing knows it.

    Args:
        run: the run.
        logs: its logs, from where they were read last.
        environ: for Slurm's commands.
        say: gets why the run waits, and how it failed.
    """
    said = ""
    while True:
        # The state is asked for first: what was printed before the end is then shown here too.
        shown = status(run, environ)
        if shown["exit_code"] is not None or shown["state"] == "unknown":
            break
        text = _waiting(shown)
        if text != said:
            say(text)
            said = text
        asked = time.monotonic()
        while time.monotonic() < asked + ASK_S:
            yield from logs.lines()
            time.sleep(logs.pause)
            if run.result_file.exists() and shown["state"] != "pending":
                break
    yield from logs.lines(ended=True)
    if shown["exit_code"] is None:
        say(f"{run.path.name}: nothing knows how this run ended; no record was left")
        return 1
    if shown["failure"]:
        say(finish.describe(shown["failure"]))
    return int(shown["exit_code"])


def _waiting(shown: Mapping[str, Any]) -> str:
    text = f"{shown['run']} is {shown['state']}"
    if shown["reason"]:
        text += f" ({shown['reason']})"
    if shown["start"] and shown["state"] == "pending":
        text += f", expected to start {shown['start']}"
    return text
