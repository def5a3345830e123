"""Run one ``srun`` and watch it: its job's id, the queue, the first failure, the end."""

from __future__ import annotations

import platform
import signal
import time
from typing import TYPE_CHECKING

from toolkit.common.process import Signals, exit_code, start
from toolkit.entrypoint import codes, finish, run_files
from toolkit.errors import UnavailableError
from toolkit.plan import Outcome
from toolkit.slurm import queue

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping

    from toolkit.entrypoint.finish import Json
    from toolkit.job import Job
    from toolkit.plan import Plan
    from toolkit.run_dir import RunDir
    from toolkit.targets import Note

#: After a rank has failed, or the step was ended, srun ends by itself; it is given this long.
END_LIMIT_S = 60.0
#: How often a waiting job's reason is asked for, and an id that is not known yet.
QUEUE_POLL_S = 5.0
#: How long ``toolkit run`` waits in the queue; who wants to wait longer submits the job.
QUEUE_LIMIT_S = 24 * 3600.0


class _Watch:
    """One srun: what it has said, and whose job or step it is."""

    def __init__(self, job: Job, run: RunDir, env: Mapping[str, str], note: Note) -> None:
        self.job = job
        self.run = run
        self.env = env
        self.note = note
        self.id: str | None = None
        self.waits = False
        self.failed_at: float | None = None
        self._log = run.path / run_files.SRUN_LOG
        self._read = 0
        self._asked = time.monotonic() - QUEUE_POLL_S + 0.5
        self._shown = ""

    def listen(self) -> None:
        """Read what srun has said since the last time; it writes on this machine."""
        with self._log.open("rb") as log:
            log.seek(self._read)
            whole, newline, _ = log.read().rpartition(b"\n")
        self._read += len(whole) + len(newline)
        for line in whole.decode(errors="replace").splitlines():
            number, text = finish.split_label(line)
            if number is not None:
                continue
            waits, allocated = queue.waiting_for(text)
            if waits or allocated:
                self.waits = waits is not None
                self.know(waits or allocated)
            if self.failed_at is None and finish.first_event(text):
                self.failed_at = time.monotonic()

    def know(self, job_id: str | None) -> None:
        """Keep the id of the job, or of the step in it, by which it can be asked for and ended."""
        if job_id and self.id is None:
            self.id = job_id
            self.run.update_record(job_id=job_id)
            self.note(f"job {job_id}; `toolkit status`, `logs -f` and `cancel` take it")

    def look(self, srun: subprocess.Popen[bytes]) -> Json | None:
        """Ask Slurm now and then for the id, and why a job waits; a failure if that is in vain."""
        if time.monotonic() < self._asked + QUEUE_POLL_S:
            return None
        if self.id is None:
            self.know(self._find_id(srun))
        elif not self.waits:
            return None
        self._asked = time.monotonic()
        if self.id is None or not self.waits:
            return None
        found = queue.status(self.id, self.env)
        if found is None or not found.pending:
            return None
        if found.reason in queue.HOPELESS:
            why = f"{found}: the cluster has nothing that fits this request"
            return finish.failure("slurm", f"cannot start: {why}", UnavailableError.exit_code)
        if str(found) != self._shown:
            self._shown = str(found)
            self.note(str(found))
        return None

    def _find_id(self, srun: subprocess.Popen[bytes]) -> str | None:
        if self.job.allocation is not None:
            return finish.step_id(str(self.run.path))
        # srun leads a session of its own, by which its job is known.
        return queue.job_of_session(
            self.job.spec.job_name, f"{platform.node()}:{srun.pid}", self.env
        )


def watch(job: Job, plan: Plan, run: RunDir, note: Note) -> Outcome:
    """Run the plan's srun to its end, whatever ends it.

    The exit code is the first failing rank's own. SIGINT and SIGTERM cancel the step or job (130),
    and so does a wait in the queue that cannot end or takes longer than a day (78).
    """
    (process,) = plan.processes
    begun = time.time()
    # A pasted plan shows what its ranks print; here each rank writes its own log.
    env = {**plan.environment(process, job.environ), "TOOLKIT_LOG": "1"}
    with (run.path / run_files.SRUN_LOG).open("ab") as log:
        srun = start(process.argv, env, plan.cwd, log)
    watched = _Watch(job, run, env, note)
    with Signals() as signals:
        try:
            failed = _wait(srun, watched, signals)
        finally:
            _end(srun, watched, signals)
    watched.listen()
    if failed is None:
        failed = finish.judge(str(run.path), exit_code(srun))
        if failed is not None and _is_slurms(failed):
            failed = _what_slurm_says(failed, watched)
    return Outcome(
        exit_code=failed["exit_code"] if failed else 0,
        started=begun,
        ended=time.time(),
        hosts=tuple(finish.hosts(finish.rank_records(str(run.path)))),
        failure=failed,
    )


def _wait(srun: subprocess.Popen[bytes], watched: _Watch, signals: Signals) -> Json | None:
    """Wait for srun's end; a failure where we end it ourselves."""
    queue_deadline = time.monotonic() + QUEUE_LIMIT_S
    while srun.poll() is None:
        time.sleep(0.05)
        watched.listen()
        if signals.caught is not None:
            said = f"was cancelled by {signals.caught.name}"
            return finish.failure("toolkit", said, codes.CANCELLED)
        if watched.failed_at and time.monotonic() > watched.failed_at + END_LIMIT_S:
            return None
        failed = watched.look(srun)
        if failed is None and watched.waits and time.monotonic() > queue_deadline:
            why = f"did not start in time: job {watched.id}"
            failed = finish.failure("slurm", why, UnavailableError.exit_code)
        if failed is not None:
            return failed
    return None


def _is_slurms(failed: Json) -> bool:
    """Whether Slurm may know better than srun why it ended."""
    return failed["rank"] is None and failed["origin"] == "slurm"


def _what_slurm_says(failed: Json, watched: _Watch) -> Json:
    """Ask Slurm why it ended a job: for a preempted one, srun says no more than for scancel."""
    job_id = (watched.id or finish.job_id(str(watched.run.path)) or "").partition(".")[0]
    if not job_id:
        return failed
    job = queue.final_status(job_id, watched.env)
    if job is None or job.state not in codes.OF_STATE or not job.final_code:
        return failed
    said = f"was ended: job {job_id} is {job.state.lower()}"
    return finish.failure("slurm", said, job.final_code)


def _end(srun: subprocess.Popen[bytes], watched: _Watch, signals: Signals) -> None:
    """End srun where it still runs: its ranks are told, and the job is ended after the grace."""
    if srun.poll() is not None:
        return
    before = signals.count
    if watched.id and not watched.waits and watched.failed_at is None and signals.count:
        queue.signal(watched.id, "TERM", watched.env)
        deadline = time.monotonic() + watched.job.spec.grace
        while time.monotonic() < deadline and signals.count == before and srun.poll() is None:
            time.sleep(0.05)
    # srun ends its step, and its job where that was its own.
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + END_LIMIT_S
        if srun.poll() is None:
            srun.send_signal(number)
        while srun.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
    if watched.id and signals.count:
        queue.cancel(watched.id, watched.env)
