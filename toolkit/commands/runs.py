"""``toolkit status``, ``logs`` and ``cancel``: what is seen and done of a run later."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit import config, run_dir
from toolkit.commands.display import message
from toolkit.commands.options import Runs
from toolkit.entrypoint.finish import describe
from toolkit.errors import UsageError

if TYPE_CHECKING:
    from toolkit.run_dir import RunDir

Which = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]", help="A run's folder or name, or a job id [default: the newest]."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

#: How often a log that is followed is looked at, and how often Slurm is asked for the job's state.
FOLLOW_S = 0.2
ASK_S = 5.0
#: Logs opened in a second at most: each costs the shared file system's metadata server a request,
#: and a mere look at a file's size may be answered from an old one.
OPENS_PER_SECOND = 500


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
    run = _find(which, runs)
    if elements := run.elements():
        names = ", ".join(element.path.name for element in elements[:8])
        msg = f"{run.path.name} is an array; name one of its elements: {names}."
        raise UsageError(msg)
    printer = _Printer(run, rank)
    printer.show()
    if follow:
        raise typer.Exit(_follow(run, printer))


def cancel(which: Which = None, runs: Runs = None) -> None:
    """Cancel a run that is queued or running."""
    from toolkit import runs as later

    message(later.cancel(_find(which, runs), os.environ))


def _find(which: str | None, runs: str | None) -> RunDir:
    cwd = Path.cwd()
    settings = config.settings({"runs": runs}, os.environ, cwd)
    return run_dir.find(which, run_dir.root(config.value(settings, "runs"), cwd))


class _Printer:
    """Prints what the logs of a run have gained, each line behind the name of its rank."""

    def __init__(self, run: RunDir, rank: int | None) -> None:
        logs = run.logs()
        if rank is not None:
            if rank >= len(logs):
                msg = f"--rank {rank}: {run.path.name} has the logs of {len(logs)} {run.task_is}s."
                raise UsageError(msg)
            logs = [logs[rank]]
        self._offsets = dict.fromkeys(logs, 0)
        self.pause = pause(len(logs))

    def show(self, *, ended: bool = False) -> None:
        """Print the whole lines that are new; half a line too, once the run has ended."""
        for path, offset in self._offsets.items():
            try:
                with path.open("rb") as log:
                    log.seek(offset)
                    text = log.read()
            except FileNotFoundError:
                continue
            if not ended:
                text = text[: text.rfind(b"\n") + 1]
            self._offsets[path] += len(text)
            who = path.stem.replace("-", " ")
            for line in text.decode(errors="replace").splitlines():
                print(f"[{who}] {line}")
        sys.stdout.flush()


def pause(logs: int) -> float:
    """Seconds between two looks at so many logs."""
    return max(FOLLOW_S, logs / OPENS_PER_SECOND)


def _follow(run: RunDir, printer: _Printer) -> int:
    """Print until the run has ended; its exit code."""
    from toolkit import runs as later

    said = ""
    while True:
        # The state is asked for first: what was printed before the end is then printed here too.
        shown = later.status(run, os.environ)
        if shown["exit_code"] is not None or shown["state"] == "unknown":
            break
        text = _waiting(shown)
        if text != said:
            message(text)
            said = text
        asked = time.monotonic()
        while time.monotonic() < asked + ASK_S:
            printer.show()
            time.sleep(printer.pause)
            if run.result_file.exists() and shown["state"] != "pending":
                break
    printer.show(ended=True)
    if shown["exit_code"] is None:
        message(f"{run.path.name}: nothing knows how this run ended; no record was left")
        return 1
    if shown["failure"]:
        message(describe(shown["failure"]))
    return int(shown["exit_code"])


def _waiting(shown: dict[str, Any]) -> str:
    text = f"{shown['run']} is {shown['state']}"
    if shown["reason"]:
        text += f" ({shown['reason']})"
    if shown["start"] and shown["state"] == "pending":
        text += f", expected to start {shown['start']}"
    return text
