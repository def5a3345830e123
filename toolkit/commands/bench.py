"""``toolkit bench``: measurements."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit import config, decide, launch
from toolkit import scale as scaling
from toolkit.commands.display import message, run_view
from toolkit.commands.options import (
    EXPLICIT_COMMAND,
    AsJson,
    Cluster,
    DryRun,
    Words,
    add_job_command,
)

if TYPE_CHECKING:
    from toolkit.job import Job

app = typer.Typer(help="Measure how a job scales.", no_args_is_help=True, add_completion=False)


def scale(
    ctx: typer.Context,
    *,
    options: dict[str, Any],
    words: Words = None,
    cluster: Cluster = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Run the same job on 1, 2, 4 … nodes, one after the other, and compare.

    Shown are throughput, speed-up and efficiency against the smallest size, and memory. The job is
    given as to `toolkit run`; its workload has to report a throughput (NAME_per_second). Where a
    size fails, the ones before it are shown, and its exit code is the command's own.
    """
    counts = scaling.node_counts(options.pop("nodes") or "1,2")
    cwd = Path.cwd()
    settings = config.settings(options, os.environ, cwd, cluster)

    def job(count: int) -> Job:
        return decide.decide(
            settings | {"nodes": config.Setting(count, f"--nodes {count}")}, words or [],
            explicit_command=ctx.meta[EXPLICIT_COMMAND], cwd=cwd, dry_run=dry_run, say=message,
        )  # fmt: skip

    if dry_run:
        for count in counts:
            print(launch.script(job(count)), end="")
        return
    sizes, code = scaling.measure(counts, job, lambda: run_view(sys.stderr), message)
    if as_json:
        shown = [
            {**asdict(size), "speed_up": up, "efficiency": efficiency}
            for size, (up, efficiency) in zip(sizes, scaling.scaling(sizes), strict=True)
        ]
        failed = {"nodes": counts[len(sizes)], "exit_code": code} if code else None
        print(json.dumps({"sizes": shown, "failed": failed}))
    elif sizes:
        print(scaling.report(sizes))
    if code:
        raise typer.Exit(code)


@app.callback()
def _bench() -> None:
    """Measure how a job scales."""


_NODES = Annotated[str | None, typer.Option("-N", "--nodes", help="Such as 1,2,4 [default: 1,2].")]
add_job_command(app, "scale", scale, nodes=_NODES)
