"""Runs seen later: what state one is in, how it ended, and cancelling it.

A run's own record comes first; where a job was ended before it could write one, it is rebuilt from
what Slurm knows and from the ranks' logs.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import platform
import signal
import time
from typing import TYPE_CHECKING, Any

from toolkit.entrypoint import codes, finish, processes, run_files
from toolkit.errors import UnavailableError, UsageError
from toolkit.options import JobSpec
from toolkit.plan import Outcome
from toolkit.slurm import queue

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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
        state = result.get("state") or ("failed" if code else "completed")
        shown.update(state=state, exit_code=code, failure=result["failure"])
    elif processes.lives(record):
        shown["state"] = "running"
    elif left_alone(run, environ):
        shown.update(state="running", reason="nothing watches it any more")
    return shown


def _importance(shown: Mapping[str, Any]) -> int:
    """Which element speaks for its array: one that goes on, then one that failed."""
    return 0 if shown["exit_code"] is None else 1 if shown["exit_code"] else 2


def rebuild(run: RunDir, job: queue.JobStatus) -> dict[str, Any]:
    """The result of a job that could not write its own; kept where that is possible."""
    path = str(run.path)
    result = run.result()  # the batch script may have written it while Slurm was asked
    if result is not None:
        return result
    code = job.final_code
    failed = finish.judge(path, code)
    if failed is not None and failed["origin"] != "toolkit" and job.state in codes.OF_STATE:
        # Slurm's own word for why it ended a job is better than the rank that died of it.
        failed = finish.failure("slurm", f"ended as {job.state.lower()}", code)
    elif failed is not None and failed["rank"] is None and failed["origin"] == "slurm":
        failed = finish.failure("slurm", f"ended as {job.state.lower()}", code)
        failed["last_lines"] = finish.messages(path)[-finish.LAST_LINES :]
    records = finish.rank_records(path)
    result = finish.result(
        path,
        0,
        failed,
        started=min((record["started"] for record in records), default=None),
        ended=time.time(),
        hosts=finish.hosts(records),
    )
    with contextlib.suppress(OSError):  # looking needs no room, and no right to write
        finish.write_json(str(run.result_file), result)
    return result


def left_alone(run: RunDir, environ: Mapping[str, str]) -> bool:
    """Whether ranks go on although the process that watched them was killed."""
    if run.record().get("target") == "docker":
        from toolkit.targets import docker  # noqa: PLC0415 - only its runs need it

        return docker.is_up(run, environ)
    return bool(_ranks_here(run))


def _ranks_here(run: RunDir) -> list[dict[str, Any]]:
    """The records of the ranks that still run on this machine."""
    return [one for one in finish.rank_records(str(run.path)) if processes.lives(one)]


def cancel(run: RunDir, environ: Mapping[str, str], say: Callable[[str], None]) -> str:
    """Cancel a run: its ranks get the grace to save what they have; what was done, in a sentence.

    Raises:
        UsageError: if the run has ended.
        UnavailableError: if it runs where it cannot be reached from here.
    """
    record = run.record()
    if run.result() is not None:
        raise UsageError(f"{run.path.name} has ended already; there is nothing to cancel.")
    grace = float(record.get("job", {}).get("grace", JobSpec().grace))
    if processes.lives(record):
        os.kill(record["pid"], signal.SIGTERM)
        return f"sent SIGTERM to process {record['pid']}, which ends the run"
    if job_id := record.get("job_id"):
        return _cancel_job(run, str(job_id), grace, environ, say)
    if left_alone(run, environ):
        return _end_left(run, grace, environ)
    msg = (
        f"{run.path.name} was started on {record.get('host')} by process {record.get('pid')}, which"
        " does not run here. Cancel it there."
    )
    raise UnavailableError(msg)


def _cancel_job(
    run: RunDir, job_id: str, grace: float, environ: Mapping[str, str], say: Callable[[str], None]
) -> str:
    """Cancel a job or step of Slurm's, whose ranks are told first."""
    for one in run.elements() or [run]:
        _mark_cancelled(one)
    job = queue.status(job_id, environ)
    if job is not None and job.state == "RUNNING" and grace:
        queue.signal(job_id, "TERM", environ)
        say(f"job {job_id}: its ranks have {grace:g} s to save what they have")
        deadline = time.monotonic() + grace
        while job is not None and job.state == "RUNNING" and time.monotonic() < deadline:
            time.sleep(min(1.0, grace))
            job = queue.status(job_id, environ)
    refused = queue.cancel(job_id, environ)
    if refused and (job is None or job.active):
        raise UnavailableError(f"job {job_id} could not be cancelled: {refused}")
    return f"asked Slurm to cancel job {job_id}"


def _end_left(run: RunDir, grace: float, environ: Mapping[str, str]) -> str:
    """End ranks that nothing watches any more, and record it."""
    _mark_cancelled(run)
    if run.record().get("target") == "docker":
        from toolkit.targets import docker  # noqa: PLC0415 - as above

        docker.remove(run, environ)
    else:
        deadline = time.monotonic() + grace
        for number in (signal.SIGTERM, signal.SIGKILL):
            for one in _ranks_here(run):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(one["pid"], number)
            while _ranks_here(run) and time.monotonic() < deadline:
                time.sleep(0.1)
    records = finish.rank_records(str(run.path))
    failed = finish.judge(str(run.path), codes.CANCELLED)
    begun = min((record["started"] for record in records), default=time.time())
    run.finish(Outcome(codes.CANCELLED, begun, time.time(), tuple(finish.hosts(records)), failed))
    return f"ended the ranks of {run.path.name}, which nothing watched any more"


def _mark_cancelled(run: RunDir) -> None:
    """Say who cancels a run, so that it is not taken for completed, however its ranks end."""
    mark = {"user": getpass.getuser(), "host": platform.node(), "time": time.time()}
    with contextlib.suppress(OSError):
        finish.write_json(str(run.path / run_files.CANCELLED), mark)


#: How often Slurm is asked for the state of a job that is followed.
ASK_S = 5.0


def follow(
    run: RunDir,
    environ: Mapping[str, str],
    show: Callable[..., None],
    say: Callable[[str], None],
    *,
    pause: float,
) -> int:
    """Show the lines of a run until it ends; its exit code, 1 where nothing knows it.

    Args:
        run: the run.
        environ: for Slurm's commands.
        show: shows what its logs have gained; all of it where ``ended``.
        say: gets why the run waits, and how it failed.
        pause: seconds between two looks at the logs.
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
        if _is_hopeless(shown):
            say(f"{run.path.name} will never start; `toolkit cancel` takes it out of the queue")
            return codes.UNAVAILABLE
        until = time.monotonic() + ASK_S
        while time.monotonic() < until:
            show(ended=False)
            time.sleep(pause)
            if run.result_file.exists() and shown["state"] != "pending":
                break
    show(ended=True)
    for one in shown["elements"] or [shown]:
        if one["failure"]:
            say(finish.describe(one["failure"]))
    if shown["exit_code"] is None:
        say(f"{run.path.name}: nothing knows how this run ended; no record was left")
        return 1
    return int(shown["exit_code"])


def _is_hopeless(shown: Mapping[str, Any]) -> bool:
    """Whether a run waits for what will not be."""
    return shown["state"] == "pending" and shown["reason"] in queue.HOPELESS


def _waiting(shown: Mapping[str, Any]) -> str:
    text = f"{shown['run']} is {shown['state']}"
    if shown["reason"]:
        text += f" ({shown['reason']})"
    if shown["start"] and shown["state"] == "pending":
        text += f", expected to start {shown['start']}"
    return text
