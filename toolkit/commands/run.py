"""``toolkit run``: decide the job, run it where it can run, show how it ends."""

from __future__ import annotations

import json
import os
import sys
import time
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
    from collections.abc import Mapping

    from toolkit.config import Setting


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
    target, why = targets.choose(settings.get("on"))
    runs = run_dir.root(settings.get("runs"), cwd)
    now = time.time()
    name = run_dir.name_for(spec.job_name, now)
    record = run_dir.record_of(spec, target.NAME, cwd, now)
    if dry_run:
        path = next(path for path in run_dir.candidates(runs, name) if not path.exists())
        print(target.plan(spec, path, cwd=cwd, environ=os.environ, record=record).script(), end="")
        return
    target.check(spec)
    view.message(f"running on {target.NAME} ({why})")
    path = run_dir.reserve(runs, name)
    try:
        plan = target.plan(spec, path, cwd=cwd, environ=os.environ, record=record)
    except ToolkitError:
        path.rmdir()
        raise
    for note in plan.notes:
        view.message(note)
    started = run_dir.fill(path, record, workload=spec.workload is not None)
    (path / "script.sh").write_text(plan.script(), encoding="utf-8")
    with view.view(sys.stderr if as_json else sys.stdout) as shown:
        outcome = target.run(spec, plan, started, shown, os.environ)
    result = started.finish(outcome)
    if result["failure"]:
        view.message(describe(result["failure"]))
    view.message(f"run directory: {path}")
    if as_json:
        print(json.dumps(result))
    raise typer.Exit(outcome.exit_code)


def job(settings: Mapping[str, Setting], words: list[str], *, explicit_command: bool) -> JobSpec:
    """The job of a command line.

    Raises:
        UsageError: if the first word is no workload and no ``--`` marks it as a command.
    """
    if explicit_command or not words:
        return make_spec(settings, command=tuple(words))
    name, *arguments = words
    known = run_dir.workload_names()
    if name not in known:
        msg = config.unknown("workload", name, known)
        raise UsageError(f"{msg} To run a command of your own, put it after --.")
    return make_spec(settings, workload=name, command=tuple(arguments))
