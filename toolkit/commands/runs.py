"""``toolkit status``, ``logs`` and ``cancel``: what is seen and done of a run later."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit import config, run_dir
from toolkit.commands.display import message
from toolkit.commands.options import Runs
from toolkit.entrypoint.finish import describe

if TYPE_CHECKING:
    from toolkit.run_dir import RunDir

Which = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]", help="A run's folder or name, or a job id [default: the newest]."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def status(which: Which = None, runs: Runs = None, *, as_json: AsJson = False) -> None:
    """Show the state of a run: queued and why, running, or how it ended."""
    from toolkit import runs as later

    shown = later.status(_find(which, runs), os.environ)
    if as_json:
        print(json.dumps(shown))
        return
    print(f"run      {shown['run_dir']}")
    job = f" (job {shown['job_id']})" if shown["job_id"] else ""
    print(f"state    {shown['state']}{job}")
    for key in ("reason", "start", "exit_code"):
        if shown[key] is not None:
            print(f"{key.replace('_', ' '):9}{shown[key]}")
    if shown["failure"]:
        print(f"failure  {describe(shown['failure'])}")
    for key, value in shown["metrics"].items():
        print(f"{key}: {value}")
    for element in shown["elements"]:
        code = "" if element["exit_code"] is None else f", exit code {element['exit_code']}"
        print(f"{element['run']}: {element['state']}{code}")


def logs(
    which: Which = None,
    runs: Runs = None,
    *,
    follow: Annotated[
        bool,
        typer.Option("-f", "--follow", help="Go on until the run ends; end with its exit code."),
    ] = False,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Only this rank (under torchrun: this node).")
    ] = None,
) -> None:
    """Show what the ranks of a run printed."""
    from toolkit import runs as later
    from toolkit.commands.display import run_view
    from toolkit.launch import show
    from toolkit.logs import Logs

    run = _find(which, runs)
    elements = run.elements() if rank is None else []
    read = [Logs(one, name=one.path.name) for one in elements] or [Logs(run, rank)]
    with run_view(sys.stdout, vital=False) as view:

        def show_all(*, ended: bool) -> None:
            for one in read:
                show(one, view, ended=ended)

        show_all(ended=not follow)
        if follow:
            pause = sum(one.pause for one in read)
            raise typer.Exit(later.follow(run, os.environ, show_all, message, pause=pause))


def cancel(which: Which = None, runs: Runs = None) -> None:
    """Cancel a run that is queued or running."""
    from toolkit import runs as later

    message(later.cancel(_find(which, runs), os.environ, message))


def _find(which: str | None, runs: str | None) -> RunDir:
    cwd = Path.cwd()
    settings = config.settings({"runs": runs}, os.environ, cwd)
    return run_dir.find(which, run_dir.root(config.value(settings, "runs"), cwd))
