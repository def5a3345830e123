"""The ``slurm`` target: one ``srun`` that starts every rank, or one ``sbatch`` that submits it."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from toolkit import run_dir as run_dirs
from toolkit.common.capture import capture
from toolkit.entrypoint import run_files
from toolkit.errors import UnavailableError, UsageError
from toolkit.options import Said, said
from toolkit.plan import Plan, Process
from toolkit.slurm import environment, probe, srun

if TYPE_CHECKING:
    from toolkit.job import Job
    from toolkit.plan import Outcome
    from toolkit.run_dir import RunDir
    from toolkit.targets import Note

SUBMIT_TIMEOUT_S = 120


def plan(job: Job) -> Plan:
    """One srun, or one sbatch with its script among the files.

    Raises:
        UsageError: if something of the user's cannot be passed on.
        UnavailableError: if the job does not fit into the allocation that we are in.
    """
    return _batch(job) if job.batch else _step(job)


def _step(job: Job) -> Plan:
    spec, allocation = job.spec, job.allocation
    hosts: tuple[str, ...] = ()
    if allocation is not None:
        environment.fits(spec, allocation)
        hosts = environment.uneven(spec, allocation)
    step = srun.compose(job, hosts)
    notes = [*_about_path(job), *job.notes, *step.notes]
    if allocation is not None:
        notes += [
            f"{flag} has no effect on a step in job {allocation.job_id}"
            for flag in said(spec, Said.JOB)
        ]
    if hosts:
        notes.append(
            "a node of this allocation has fewer CPUs than ranks, which share them; ask for an even"
            f" allocation with salloc -N{spec.nodes} --ntasks-per-node={spec.ntasks_per_node}"
        )
    where = f"in job {allocation.job_id}" if allocation else "through srun"
    return Plan(
        title=f"toolkit run: {spec.nodes} x {spec.ntasks_per_node} ranks {where}",
        run_dir=job.run_dir,
        cwd=job.cwd,
        stage=run_dirs.stage_command(job.run_dir, job.record, workload=job.workload),
        processes=(Process(step.argv, label="srun"),),
        env=step.env,
        unset=tuple(sorted({*job.unset, *job.left_out})),
        notes=tuple(notes),
    )


def _batch(job: Job) -> Plan:
    """A batch job is always a new one, to which nothing of a job around it is passed on."""
    from toolkit.slurm import sbatch  # noqa: PLC0415 - a dry run of toolkit run does without

    spec = job.spec
    text, notes = sbatch.script(job)
    return Plan(
        title=f"toolkit submit: {spec.nodes} x {spec.ntasks_per_node} ranks through sbatch",
        run_dir=job.run_dir,
        cwd=job.cwd,
        stage=run_dirs.stage_command(job.run_dir, job.record, workload=job.workload),
        processes=(Process(sbatch.submit_argv(job.run_dir), label="sbatch"),),
        env={
            name: value
            for name, value in spec.env_values.items()
            if environment.through_sbatch(name, value)
        },
        unset=job.unset,
        notes=(*_about_path(job), *job.notes, *notes),
        files={run_files.BATCH_SCRIPT: text},
    )


def shell_plan(job: Job, *, terminal: bool) -> Plan:
    """An interactive shell, or one command, in the job's container.

    Raises:
        UsageError: if the job has none.
    """
    if job.container is None:
        raise UsageError("toolkit shell: name the image with --image or in toolkit.toml.")
    argv, notes = srun.shell(job, terminal=terminal)
    return Plan(
        title="toolkit shell",
        run_dir=job.run_dir,
        cwd=job.cwd,
        stage=(),
        processes=(Process(argv),),
        env=job.spec.env_values,
        unset=(*job.unset, *job.left_out),
        notes=(*job.notes, *notes),
    )


def check(job: Job) -> None:
    """Raise UnavailableError where this machine cannot start the job."""
    why = probe.unreachable(job.environ)
    if why is not None:
        msg = f"--on slurm: {why}. Log in to the cluster, or run here with --on local."
        raise UnavailableError(msg)
    if job.container is None:
        from toolkit.targets import local  # noqa: PLC0415 - the ranks use the same Python there

        local.check(job)
    elif not probe.has_pyxis(job.environ):
        msg = (
            "--container-image: srun here does not know it, so this cluster has no pyxis. Ask its"
            " administrators for it, or run without a container."
        )
        raise UnavailableError(msg)


def run(job: Job, plan: Plan, run: RunDir, note: Note) -> Outcome:
    """Run the plan's srun to its end, whatever ends it."""
    from toolkit.targets import step  # noqa: PLC0415 - a dry run does without

    return step.watch(job, plan, run, note)


def submit(job: Job, plan: Plan) -> str:
    """Hand the batch script to Slurm; the id of the job.

    Raises:
        UnavailableError: if Slurm refuses it.
    """
    (process,) = plan.processes
    env = plan.environment(process, job.environ)
    asked = capture(process.argv, SUBMIT_TIMEOUT_S, env, cwd=plan.cwd)
    if asked.ok and asked.stdout.strip():
        # --parsable prints "ID" or "ID;CLUSTER"; a site's own greeting may stand before it.
        return asked.stdout.strip().splitlines()[-1].partition(";")[0]
    said_why = asked.said()
    if asked.code is None and shutil.which("sbatch", path=env.get("PATH")):
        said_why += "; ask `squeue --me` before you submit it again"
    raise UnavailableError(f"Slurm refused the job: {said_why}")


def _about_path(job: Job) -> list[str]:
    """Check that the run directory can be mounted, where it has to be."""
    if job.container is None:
        return []
    from toolkit import mounts  # noqa: PLC0415 - milliseconds that others need not pay

    mounts.passable(str(job.run_dir), "the run directory")
    if any(character.isspace() for character in str(job.run_dir)):
        return [f"{job.run_dir}: white space in a mount needs pyxis 0.24 or newer"]
    return []
