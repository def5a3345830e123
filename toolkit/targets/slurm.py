"""The ``slurm`` target: one ``srun`` that starts every rank, or one ``sbatch`` that submits it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from toolkit import run_dir as run_dirs
from toolkit.entrypoint import finish
from toolkit.errors import UnavailableError
from toolkit.job import Outcome, Plan, Process
from toolkit.slurm import environment, probe, srun

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from toolkit.job import JobSpec
    from toolkit.run_dir import RunDir
    from toolkit.targets import View

NAME = "slurm"
SUBMIT_TIMEOUT_S = 120


def plan(
    spec: JobSpec,
    path: Path,
    *,
    cwd: Path,
    environ: Mapping[str, str],
    record: Mapping[str, object],
) -> Plan:
    """What will be executed: a step in the allocation that we are in, else a job of its own."""
    job = environment.allocation(environ)
    note = stale(job.job_id, environ) if job else None
    return compose(spec, path, cwd=cwd, environ=environ, record=record, stale=note)


def compose(
    spec: JobSpec,
    path: Path,
    *,
    cwd: Path,
    environ: Mapping[str, str],
    record: Mapping[str, object],
    stale: str | None = None,
    python: str = sys.executable,
    exists: Callable[[str], bool] = os.path.exists,
) -> Plan:
    """The plan in a given environment. Pure, but for what ``exists`` looks at.

    Args:
        spec: the job.
        path: the run directory.
        cwd: where the ranks start.
        environ: the caller's environment.
        record: what ``run.json`` keeps.
        stale: why the allocation in ``environ`` does not count, if it does not.
        python: this interpreter.
        exists: whether a path is on this machine.

    Raises:
        UsageError: if something of the user's cannot be passed on.
        UnavailableError: if the job does not fit into the allocation that we are in.
    """
    environment.require(spec, environ)
    job = environment.allocation(environ) if stale is None else None
    hosts: tuple[str, ...] = ()
    if job is not None:
        environment.fits(spec, environ)
        hosts = environment.uneven(spec, job)
    step = srun.compose(
        spec,
        str(path),
        kind="job" if job is None else "step",
        cwd=cwd,
        environ=environ,
        python=python,
        job_id=job.job_id if job else "",
        hosts=hosts,
        exists=exists,
    )
    notes = [*([stale] if stale else []), *_about_path(spec, path), *step.notes]
    if job is not None:
        notes += [
            f"{flag} has no effect on a step in job {job.job_id}" for flag in srun.job_flags(spec)
        ]
    if hosts:
        notes.append(
            "a node of this allocation has fewer CPUs than ranks, which share them; ask for an even"
            f" allocation with salloc -N{spec.nodes} --ntasks-per-node={spec.ntasks_per_node}"
        )
    unset = environment.outer(environ, spec, step=job is not None)
    return Plan(
        title=f"toolkit run: {spec.nodes} x {spec.ntasks_per_node} ranks"
        + (f" in job {job.job_id}" if job else " through srun"),
        run_dir=path,
        cwd=cwd,
        stage=run_dirs.stage_command(path, record, workload=spec.workload is not None),
        processes=(Process(step.argv, label="srun"),),
        env=step.env,
        unset=tuple(sorted({*unset, *_login_node(spec, environ)})),
        notes=tuple(notes),
    )


def submit_plan(
    spec: JobSpec,
    path: Path,
    *,
    cwd: Path,
    environ: Mapping[str, str],
    record: Mapping[str, object],
    python: str = sys.executable,
    exists: Callable[[str], bool] = os.path.exists,
) -> Plan:
    """The plan of a batch job: its script is in ``files``, its one process is ``sbatch``.

    It always makes a new job, to which nothing of a job around it is passed on. Arguments and
    errors are those of :func:`compose`.
    """
    from toolkit.slurm import sbatch  # noqa: PLC0415 - a dry run of toolkit run does without

    environment.require(spec, environ)
    text, notes = sbatch.script(spec, path, cwd=cwd, environ=environ, python=python, exists=exists)
    return Plan(
        title=f"toolkit submit: {spec.nodes} x {spec.ntasks_per_node} ranks through sbatch",
        run_dir=path,
        cwd=cwd,
        stage=run_dirs.stage_command(path, record, workload=spec.workload is not None),
        processes=(Process(sbatch.submit_argv(path), label="sbatch"),),
        env={name: value for name, value in spec.env if environment.through_sbatch(name)},
        unset=environment.outer(environ, spec),
        notes=(*_about_path(spec, path), *notes),
        files={sbatch.SCRIPT: text},
    )


def check(spec: JobSpec) -> None:
    """Raise UnavailableError where this machine cannot start the job."""
    why = probe.unreachable(os.environ)
    if why is not None:
        msg = f"--on slurm: {why}. Log in to the cluster, or run here with --on local."
        raise UnavailableError(msg)
    if spec.container_image is None:
        from toolkit.targets import local  # noqa: PLC0415 - the ranks use the same Python there

        local.check(spec)
    elif not probe.has_pyxis(os.environ):
        msg = (
            "--container-image: srun here does not know it, so this cluster has no pyxis. Ask its"
            " administrators for it, or run without a container."
        )
        raise UnavailableError(msg)


def run(
    spec: JobSpec,  # noqa: ARG001 - every target's run has it
    plan: Plan,
    run: RunDir,
    view: View,
    environ: Mapping[str, str],
) -> Outcome:
    """Run the plan's srun to its end, whatever ends it."""
    from toolkit.slurm import step  # noqa: PLC0415 - a dry run does without

    return step.run(plan, run, view, environ)


def submit(plan: Plan, run: RunDir, environ: Mapping[str, str]) -> str:
    """Hand the batch script to Slurm; the id of the job.

    Raises:
        UnavailableError: if Slurm refuses it; the run directory's result says so too.
    """
    (process,) = plan.processes
    begun = time.time()
    try:
        ran = subprocess.run(
            process.argv, env=plan.environment(process, environ), cwd=plan.cwd,
            capture_output=True, text=True, timeout=SUBMIT_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        said = f"sbatch did not answer within {SUBMIT_TIMEOUT_S} s; ask `squeue --me` before again"
    else:
        if ran.returncode == 0:
            # --parsable prints "ID" or "ID;CLUSTER"; a site's own greeting may stand before it.
            return ran.stdout.strip().splitlines()[-1].partition(";")[0]
        said = "; ".join(ran.stderr.strip().splitlines())
    code = UnavailableError.exit_code
    refused = finish.failure("slurm", f"was not submitted: {said}", code)
    run.finish(Outcome(code, begun, time.time(), (), refused))
    raise UnavailableError(f"Slurm refused the job: {said}")


def stale(job_id: str, environ: Mapping[str, str]) -> str | None:
    """Why a job id in the environment is that of no running job; None where it may be one."""
    from toolkit.slurm import queue  # noqa: PLC0415 - only in an allocation

    job = queue.status(job_id, environ)
    if job is not None:
        why = None if job.state == "RUNNING" else f"is {job.state.lower()}"
    else:
        why = None if probe.unreachable(environ) else "is unknown to Slurm"
    return why and f"SLURM_JOB_ID={job_id} of this shell {why}: this makes a job of its own"


def _about_path(spec: JobSpec, path: Path) -> list[str]:
    """Check that the run directory can be mounted, where it has to be."""
    if spec.container_image is None:
        return []
    from toolkit.slurm import container  # noqa: PLC0415 - milliseconds that others need not pay

    container.passable(str(path), "the run directory")
    if any(character.isspace() for character in str(path)):
        return [f"{path}: white space in a mount needs pyxis 0.24 or newer"]
    return []


def _login_node(spec: JobSpec, environ: Mapping[str, str]) -> list[str]:
    """Names in ``environ`` that stay out of the container."""
    names = environment.login_node(spec)
    prefixes = tuple(name for name in names if name.endswith("_"))
    asked = environment.asked_for(spec)
    return [
        name
        for name in environ
        if name not in asked and (name in names or (prefixes and name.startswith(prefixes)))
    ]
