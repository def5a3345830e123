"""``toolkit run`` and ``toolkit submit``: decide the job, start it, show how it ends."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from toolkit import config, run_dir, targets
from toolkit.commands import view
from toolkit.commands.options import EXPLICIT_COMMAND, Cluster, DryRun, Json, Words
from toolkit.entrypoint.finish import describe
from toolkit.errors import ToolkitError, UsageError
from toolkit.job import JobSpec, make_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from toolkit.config import Setting
    from toolkit.job import Plan
    from toolkit.run_dir import RunDir


def run(
    ctx: typer.Context,
    *,
    options: dict[str, Any],
    words: Words = None,
    cluster: Cluster = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Run a job and stream what its ranks print; end with the first failing rank's exit code.

    Without WORKLOAD or COMMAND the default workload, GraphSAGE, is trained. What stands after a
    workload's name goes to the workload; a command of your own stands after --.
    """
    cwd = Path.cwd()
    settings = config.settings(options, os.environ, cwd, cluster)
    spec = job(settings, words or [], explicit_command=ctx.meta[EXPLICIT_COMMAND])
    target, why = targets.choose(settings.get("on"), os.environ)
    if target.NAME == "slurm":
        spec = _imported(spec, settings, cwd, dry_run=dry_run)
    start = _Start(settings, spec, target.NAME, cwd, target.plan)
    if dry_run:
        start.show()
        return
    target.check(spec)
    view.message(f"running on {target.NAME} ({why})")
    plan, started = start.stage()
    with view.view(sys.stderr if as_json else sys.stdout) as shown:
        outcome = target.run(spec, plan, started, shown, os.environ)
    result = started.finish(outcome)
    if result["failure"]:
        view.message(describe(result["failure"]))
    view.message(f"run directory: {started.path}")
    if as_json:
        print(json.dumps(result))
    raise typer.Exit(outcome.exit_code)


def submit(
    ctx: typer.Context,
    *,
    options: dict[str, Any],
    words: Words = None,
    cluster: Cluster = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Submit a job to Slurm and print its run directory; `toolkit logs -f` follows it.

    WORKLOAD and COMMAND are those of `toolkit run`. Nothing of a job around this one is passed on.
    """
    from toolkit.slurm import sbatch
    from toolkit.targets import slurm

    cwd = Path.cwd()
    settings = config.settings(options, os.environ, cwd, cluster)
    spec = job(settings, words or [], explicit_command=ctx.meta[EXPLICIT_COMMAND])
    on = settings.get("on")
    if on is not None and on.value not in {"auto", "slurm"}:
        msg = f"{on.source}: a batch job goes to Slurm; `toolkit run` runs elsewhere."
        raise UsageError(msg)
    spec = _imported(spec, settings, cwd, dry_run=dry_run)
    spec = replace(spec, signal=sbatch.signal_of(spec))  # run.json keeps what the job will get
    start = _Start(settings, spec, slurm.NAME, cwd, slurm.submit_plan)
    if dry_run:
        start.show()
        return
    slurm.check(spec)
    plan, submitted = start.stage()
    elements = sbatch.array_indices(spec.array) if spec.array else []
    for index in elements:
        submitted.element(index).path.mkdir()
        submitted.element(index).update_record(**submitted.record(), element=index)
    job_id = slurm.submit(plan, submitted, os.environ)
    submitted.update_record(job_id=job_id)
    for index in elements:
        submitted.element(index).update_record(job_id=f"{job_id}_{index}")
    view.message(f"job {job_id} submitted; `toolkit logs -f` follows it")
    print(
        json.dumps({"job_id": job_id, "run_dir": str(submitted.path)})
        if as_json
        else submitted.path
    )


def job(settings: Mapping[str, Setting], words: list[str], *, explicit_command: bool) -> JobSpec:
    """The job of a command line.

    Raises:
        UsageError: if the first word is no workload and no ``--`` marks it as a command.
    """
    if explicit_command or not words:
        return _pinned(make_spec(settings, command=tuple(words)))
    name, *arguments = words
    known = run_dir.workload_names()
    if name not in known:
        msg = config.unknown("workload", name, known)
        raise UsageError(f"{msg} To run a command of your own, put it after --.")
    return _pinned(make_spec(settings, workload=name, command=tuple(arguments)))


def _pinned(spec: JobSpec) -> JobSpec:
    """The job with its image by the digest that ``toolkit push`` wrote into ``image.lock``."""
    if spec.container_image is None:
        return spec
    from toolkit.image import lock

    found = lock.pinned(spec.container_image, Path.cwd())
    if found is None:
        return spec
    image, build = found
    view.message(f"{lock.FILE_NAME}: {spec.container_image} is {image}")
    return replace(spec, container_image=image, container_build=build)


def _imported(
    spec: JobSpec, settings: Mapping[str, Setting], cwd: Path, *, dry_run: bool
) -> JobSpec:
    """The job with the imported file as its image, where there is one; a dry run asks nobody."""
    if spec.container_image is None:
        return spec
    from toolkit.enroot import use

    if dry_run:
        return use.known(spec, settings, cwd)
    return use.imported(spec, settings, cwd, say=view.message)


class _Start:
    """From a job to its plan and run directory: the same for every target, dry or not."""

    def __init__(
        self,
        settings: Mapping[str, Setting],
        spec: JobSpec,
        target: str,
        cwd: Path,
        plan: Callable[..., Plan],
    ) -> None:
        now = time.time()
        self._spec = spec
        self._cwd = cwd
        self._plan = plan
        self._runs = run_dir.root(settings.get("runs"), cwd)
        self._name = run_dir.name_for(spec.job_name, now)
        self._record = run_dir.record_of(spec, target, cwd, now)

    def _plan_for(self, path: Path) -> Plan:
        return self._plan(self._spec, path, cwd=self._cwd, environ=os.environ, record=self._record)

    def show(self) -> None:
        """Print the plan as a script; nothing is made."""
        names = run_dir.candidates(self._runs, self._name)
        print(self._plan_for(next(path for path in names if not path.exists())).script(), end="")

    def stage(self) -> tuple[Plan, RunDir]:
        """Make the run directory, say what the user should know, and return the plan."""
        path = run_dir.reserve(self._runs, self._name)
        try:
            plan = self._plan_for(path)
        except ToolkitError:
            path.rmdir()
            raise
        for note in plan.notes:
            view.message(note)
        made = run_dir.fill(path, self._record, workload=self._spec.workload is not None)
        for name, text in {**plan.files, "script.sh": plan.script()}.items():
            (path / name).write_text(text, encoding="utf-8")
        return plan, made
