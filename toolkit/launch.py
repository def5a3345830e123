"""Starting a decided job: check, run directory, plan, and a result on every way out."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from toolkit import run_dir, targets
from toolkit.common.process import Signals
from toolkit.entrypoint import codes, finish, processes, run_files
from toolkit.errors import ToolkitError, UnavailableError
from toolkit.keeper import Keeper
from toolkit.logs import SRUN, TOOLKIT, Logs
from toolkit.plan import Outcome
from toolkit.slurm import probe

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from toolkit.job import Job
    from toolkit.plan import Plan
    from toolkit.run_dir import RunDir

    Say = Callable[[str], None]


def script(job: Job) -> str:
    """What would be executed, as a script; nothing is made."""
    names = run_dir.candidates(job.runs, job.run_dir.name)
    path = next(path for path in names if not path.exists())
    return targets.load(job.target).plan(job.at(path)).script()


def begin(job: Job, say: Say) -> tuple[Keeper, RunDir]:
    """Start a job; a process of its own keeps it from now on, to its recorded end.

    Raises:
        UnavailableError: if this machine cannot run it; nothing is left then.
    """
    target = targets.load(job.target)
    target.check(job)
    say(f"running on {job.target} ({job.why})")
    job, plan, made = _stage(job, say)
    say(f"run directory: {made.path}")

    def note(text: str) -> None:
        print(text, flush=True)  # the keeper's output is the run's own log

    def work() -> None:
        begun = time.time()
        made.update_record(**processes.identify(os.getpid()))
        try:
            outcome = target.run(job, plan, made, note)
        except BaseException as error:
            _record_error(made, error, begun)
            if isinstance(error, ToolkitError | KeyboardInterrupt):
                return
            raise
        made.finish(outcome)

    return Keeper(work, made.path / run_files.NOTES), made


def run(job: Job, view: AbstractContextManager[View], say: Say) -> dict[str, Any]:
    """Run a job to its end and show what its ranks print; its result, as ``result.json`` has it.

    Args:
        job: the job.
        view: where its output goes.
        say: gets what the user should know.

    Raises:
        UnavailableError: if this machine cannot run it; nothing is left then.
    """
    keeper, made = begin(job, say)
    logs = Logs(made)
    with Signals(keeper.signal), view as shown:
        while not keeper.ended():
            show(logs, shown)
            shown.poll(made)
            time.sleep(logs.pause)
        show(logs, shown, ended=True)
        shown.poll(made)
    result = made.result()
    if result is None:  # it was killed
        failed = finish.failure("toolkit", "is not watched any more", codes.BUG)
        result = finish.result(str(made.path), 0, failed, started=None, ended=time.time(), hosts=())
    if result["failure"]:
        say(finish.describe(result["failure"]))
    say(f"run directory: {made.path}")
    return result


def show(logs: Logs, view: View, *, ended: bool = False) -> None:
    """Show what a run's logs have gained."""
    for who, text in logs.lines(ended=ended):
        if who.rpartition(" ")[2] in (SRUN, TOOLKIT):
            view.note(text)
        else:
            view.line(who, text)


class View(Protocol):
    """Where a run's output and progress go."""

    def line(self, who: str, text: str) -> None:
        """Show a line that ``rank N`` printed."""

    def note(self, text: str) -> None:
        """Show what Slurm or the toolkit has to say, such as why a job waits."""

    def poll(self, run: RunDir) -> None:
        """Show what the workload reported since the last call."""


def submit(job: Job, say: Say) -> tuple[str, RunDir]:
    """Hand a batch job to Slurm; its id, and its run directory.

    Raises:
        UnavailableError: if Slurm refuses it; its result says so too.
    """
    from toolkit.slurm import sbatch  # noqa: PLC0415 - only a batch job needs it
    from toolkit.targets import slurm  # noqa: PLC0415

    slurm.check(job)
    elements = sbatch.array_indices(job.spec.array) if job.spec.array else []
    job, plan, made = _stage(job, say)
    begun = time.time()
    try:
        for index in elements:
            made.element(index).path.mkdir()
            made.element(index).update_record(**made.record(), element=index)
        job_id = slurm.submit(job, plan)
    except BaseException as error:
        _record_error(made, error, begun, "slurm", "was not submitted")
        raise
    made.update_record(job_id=job_id)
    for index in elements:
        made.element(index).update_record(job_id=f"{job_id}_{index}")
    say(f"job {job_id} submitted; `toolkit logs -f` follows it")
    return job_id, made


def shell_plan(job: Job, *, terminal: bool) -> Plan:
    """What a shell in the job's image executes.

    Raises:
        UsageError: if the job has no image.
    """
    from toolkit.targets import slurm  # noqa: PLC0415 - only a shell needs it

    return slurm.shell_plan(job, terminal=terminal)


def become(job: Job, plan: Plan) -> NoReturn:
    """Let the plan's one process take this one over: its terminal, signals and exit code.

    Raises:
        UnavailableError: if no cluster answers.
    """
    why = probe.unreachable(job.environ)
    if why is not None:
        raise UnavailableError(f"toolkit shell: {why}. Log in to the cluster first.")
    (process,) = plan.processes
    env = plan.environment(process, job.environ)
    os.execvpe(process.argv[0], process.argv, env)  # noqa: S606 - a list, no shell


def _stage(job: Job, say: Say) -> tuple[Job, Plan, RunDir]:
    """Make the run directory, say what the user should know, and plan."""
    path = run_dir.reserve(job.runs, job.run_dir.name)
    try:
        job = job.at(path)
        plan = targets.load(job.target).plan(job)
        text = plan.script()
    except BaseException:
        path.rmdir()
        raise
    for note in plan.notes:
        say(note)
    files = {**plan.files, run_files.SCRIPT: text}
    made = run_dir.fill(path, job.record, workload=job.workload, pid=os.getpid(), files=files)
    return job, plan, made


def _record_error(
    made: RunDir,
    error: BaseException,
    begun: float,
    origin: str = "toolkit",
    what: str = "could not be run",
) -> None:
    """Leave a result where a job did not get as far as its own end."""
    if isinstance(error, ToolkitError):
        code, said = error.exit_code, str(error).rstrip(".")
    elif isinstance(error, KeyboardInterrupt):
        code, said = codes.CANCELLED, "it was cancelled"
    else:
        code, said = codes.BUG, f"{type(error).__name__}: {error}"
    failed = finish.failure(origin, f"{what}: {said}", code)
    with contextlib.suppress(OSError):  # what went wrong first is what the user is told
        made.finish(Outcome(code, begun, time.time(), (), failed))
