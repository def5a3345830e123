"""Run one ``srun`` and watch it: the ranks' lines, the queue, the first failure, the end."""

from __future__ import annotations

import re
import signal
import subprocess
import threading
import time
from typing import IO, TYPE_CHECKING

from toolkit.common.process import Signals, exit_code, start
from toolkit.entrypoint import codes, finish, run_files
from toolkit.entrypoint.start import SPARE, allow
from toolkit.errors import UnavailableError
from toolkit.plan import Outcome
from toolkit.slurm import queue

if TYPE_CHECKING:
    from collections.abc import Mapping

    from toolkit.entrypoint.finish import Json
    from toolkit.plan import Plan
    from toolkit.run_dir import RunDir
    from toolkit.targets import View

#: After a rank has failed, or SIGTERM was sent, srun ends by itself; it is given this long.
END_LIMIT_S = 60.0
#: How often a waiting job's reason is asked for.
QUEUE_POLL_S = 5.0
#: How long ``toolkit run`` waits in the queue; who wants to wait longer submits the job.
QUEUE_LIMIT_S = 24 * 3600.0

# srun --label writes "RANK: " before each line of a rank, with zeros in front.
_LABEL = re.compile(rb"(\d+): ?(.*)", re.DOTALL)
_QUEUED = re.compile(r"srun: job (\d+) queued and waiting")
_ALLOCATED = re.compile(r"srun: job (\d+) has been allocated")


class _Listener:
    """Sorts what srun prints into the ranks' logs and ``logs/srun.log``, and shows it."""

    def __init__(self, run: RunDir, view: View) -> None:
        self.waiting_job: str | None = None
        self.failed_at: float | None = None
        self._run = run
        self._task_is = run.task_is
        self._view = view
        self._logs: dict[str, IO[bytes]] = {}
        # One open log a rank. With fewer allowed, the one that was opened first makes room.
        wanted = int(run.record().get("world_size") or 0) + SPARE
        self._most_open = max(1, allow(wanted) - SPARE // 2)
        self._lock = threading.Lock()

    def read(self, stream: IO[bytes]) -> None:
        """Read one of srun's two streams to its end."""
        for line in stream:
            match = _LABEL.fullmatch(line)
            # slurmstepd speaks through a rank's stream and with its label, but is no rank.
            if match is None or match[2].startswith(b"slurmstepd"):
                self._message(match[2] if match else line)
            else:
                number = int(match[1])
                self._write(str(self._run.path / run_files.log(number, self._task_is)), match[2])
                self._view.line(f"{self._task_is} {number}", _text(match[2]))

    def _message(self, line: bytes) -> None:
        self._write(str(self._run.path / run_files.SRUN_LOG), line)
        text = _text(line)
        if queued := _QUEUED.search(text):
            self.waiting_job = queued[1]
        elif _ALLOCATED.search(text):
            self.waiting_job = None
        if self.failed_at is None:
            if finish.first_event(text):
                self.failed_at = (
                    time.monotonic()
                )  # told once, with the rank's last lines, at the end
            elif text:
                self._view.note(text)

    def _write(self, path: str, line: bytes) -> None:
        with self._lock:
            if path not in self._logs:
                if len(self._logs) >= self._most_open:
                    self._logs.pop(next(iter(self._logs))).close()
                self._logs[path] = open(path, "ab")  # noqa: SIM115, PTH123 - closed in close()
            self._logs[path].write(line)
            self._logs[path].flush()

    def close(self) -> None:
        with self._lock:
            for log in self._logs.values():
                log.close()
            self._logs.clear()


def watch(plan: Plan, run: RunDir, view: View, environ: Mapping[str, str]) -> Outcome:
    """Run the plan's srun to its end, whatever ends it.

    The exit code is the first failing rank's own. SIGINT and SIGTERM cancel the step or job (130),
    and so does a wait in the queue that cannot end or takes longer than a day (78).
    """
    (process,) = plan.processes
    begun = time.time()
    listener = _Listener(run, view)
    env = plan.environment(process, environ)
    srun = start(process.argv, env, plan.cwd, stderr=subprocess.PIPE)
    assert srun.stdout is not None
    assert srun.stderr is not None
    readers = [
        threading.Thread(target=listener.read, args=(stream,), daemon=True)
        for stream in (srun.stdout, srun.stderr)
    ]
    for reader in readers:
        reader.start()
    with Signals() as signals:
        try:
            failed = _watch(
                srun,
                listener,
                signals,
                view=view,
                run=run,
                env=env,
                queue_deadline=begun + QUEUE_LIMIT_S,
            )
        finally:
            _end(srun)
    for reader, stream in zip(readers, (srun.stdout, srun.stderr), strict=True):
        reader.join(timeout=5.0)
        if not reader.is_alive():
            stream.close()
    listener.close()
    view.poll(run)
    if failed is None:
        failed = finish.judge(str(run.path), exit_code(srun))
        if failed is not None and failed["exit_code"] == codes.CANCELLED:
            failed = _who_cancelled(failed, run, env)
    return Outcome(
        exit_code=failed["exit_code"] if failed else 0,
        started=begun,
        ended=time.time(),
        hosts=tuple(finish.hosts(finish.rank_records(str(run.path)))),
        failure=failed,
    )


def _watch(
    srun: subprocess.Popen[bytes],
    listener: _Listener,
    signals: Signals,
    *,
    view: View,
    run: RunDir,
    env: Mapping[str, str],
    queue_deadline: float,
) -> Json | None:
    """Wait for srun's end; a failure where we end it ourselves."""
    ask_at = time.monotonic() + 1.0
    shown = ""
    while srun.poll() is None:
        time.sleep(0.05)
        view.poll(run)
        if signals.caught is not None:
            return finish.failure(
                "toolkit", f"was cancelled by {signals.caught.name}", codes.CANCELLED
            )
        if listener.failed_at and time.monotonic() > listener.failed_at + END_LIMIT_S:
            return None
        job = listener.waiting_job
        if job is None or time.monotonic() < ask_at:
            continue
        ask_at = time.monotonic() + QUEUE_POLL_S
        found = queue.status(job, env)
        if found is None or not found.pending:
            continue
        if found.reason in queue.HOPELESS:
            why = f"{found}: the cluster has nothing that fits this request"
            return finish.failure("slurm", f"cannot start: {why}", UnavailableError.exit_code)
        if time.time() > queue_deadline:
            why = f"did not start in time: {found}"
            return finish.failure("slurm", why, UnavailableError.exit_code)
        if str(found) != shown:
            shown = str(found)
            view.note(shown)
    return None


def _who_cancelled(failed: Json, run: RunDir, env: Mapping[str, str]) -> Json:
    """Ask Slurm why it ended a step: for a preempted one, srun says no more than for scancel."""
    job_id = finish.job_id(str(run.path))
    job = queue.final_status(job_id, env) if job_id else None
    if job is None or job.state not in codes.OF_STATE or not job.final_code:
        return failed
    return finish.failure(
        "slurm", f"was ended: job {job_id} is {job.state.lower()}", job.final_code
    )


def _end(srun: subprocess.Popen[bytes]) -> None:
    """End srun where it still runs; it ends its step, and its job where that was its own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if srun.poll() is not None:
            return
        srun.send_signal(number)
        try:
            srun.wait(timeout=END_LIMIT_S)
        except subprocess.TimeoutExpired:
            continue


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r\n")
