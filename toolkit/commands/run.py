"""``toolkit run``, ``submit`` and ``shell``: jobs from a command line."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import typer

from toolkit import config, decide, launch
from toolkit.commands.display import message, run_view
from toolkit.commands.options import EXPLICIT_COMMAND, AsJson, Cluster, DryRun, Words


def run(
    ctx: typer.Context,
    *,
    options: dict[str, Any],
    words: Words = None,
    cluster: Cluster = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Run a job and stream what its ranks print; end with the first failing rank's exit code.

    Without WORKLOAD or COMMAND the default workload, GraphSAGE, is trained. What stands after a
    workload's name goes to the workload; a command of your own stands after --.
    """
    cwd = Path.cwd()
    job = decide.decide(
        config.settings(options, os.environ, cwd, cluster), words or [],
        explicit_command=ctx.meta[EXPLICIT_COMMAND], cwd=cwd, dry_run=dry_run, say=message,
    )  # fmt: skip
    if dry_run:
        print(launch.script(job), end="")
        return
    result = launch.run(job, run_view(sys.stderr if as_json else sys.stdout), message)
    if as_json:
        print(json.dumps(result))
    raise typer.Exit(result["exit_code"])


def submit(
    ctx: typer.Context,
    *,
    options: dict[str, Any],
    words: Words = None,
    cluster: Cluster = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Submit a job to Slurm and print its run directory; `toolkit logs -f` follows it.

    WORKLOAD and COMMAND are those of `toolkit run`. Nothing of a job around this one is passed on.
    """
    cwd = Path.cwd()
    job = decide.decide(
        config.settings(options, os.environ, cwd, cluster), words or [], batch=True,
        explicit_command=ctx.meta[EXPLICIT_COMMAND], cwd=cwd, dry_run=dry_run, say=message,
    )  # fmt: skip
    if dry_run:
        print(launch.script(job), end="")
        return
    job_id, made = launch.submit(job, message)
    print(json.dumps({"job_id": job_id, "run_dir": str(made.path)}) if as_json else made.path)


#: bash where the image has it.
SHELL = ["sh", "-c", "command -v bash >/dev/null && exec bash; exec sh"]


def shell(
    *,
    options: dict[str, Any],
    words: Words = None,
    cluster: Cluster = None,
    dry_run: DryRun = False,
) -> None:
    """Open a shell in the image on a compute node; or run COMMAND there.

    Ends with the shell's own exit code.
    """
    cwd = Path.cwd()
    settings = config.settings(options, os.environ, cwd, cluster)
    settings["on"] = config.Setting("slurm", "toolkit shell")
    job = decide.decide(
        settings, words or SHELL,
        explicit_command=True, cwd=cwd, dry_run=dry_run, say=message,
    )  # fmt: skip
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    plan = launch.shell_plan(job, terminal=terminal)
    for note in plan.notes:
        message(note)
    if dry_run:
        print(plan.commands(), end="")
    else:
        launch.become(job, plan)
