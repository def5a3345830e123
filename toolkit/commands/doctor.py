"""``toolkit doctor``: what this machine and the cluster can do, and what to mend."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Annotated

import typer

from toolkit import config
from toolkit.commands.display import message
from toolkit.commands.options import Cluster, wants_node
from toolkit.errors import UnavailableError
from toolkit.slurm import helper


def doctor(
    *,
    image: Annotated[
        str | None, typer.Option("--image", "--container-image", help="Look at this image, too.")
    ] = None,
    on: Annotated[
        str, typer.Option(help="local; or slurm: ask a compute node as well, with a short job.")
    ] = "local",
    partition: Annotated[
        str | None, typer.Option("-p", "--partition", help="Partition of that job.")
    ] = None,
    account: Annotated[
        str | None, typer.Option("-A", "--account", help="Account of that job.")
    ] = None,
    save: Annotated[
        bool, typer.Option("--save", help="Write what was learned into toolkit.toml.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    cluster: Cluster = None,
) -> None:
    """Check this machine, the cluster and an image: one line each, with what to do about it.

    Ends with 78 where something would stop a job.
    """
    from toolkit.cluster import doctor as checks

    on_node = wants_node(on)
    cwd = Path.cwd()
    settings = config.settings(
        {"partition": partition, "account": account}, os.environ, cwd, cluster
    )
    srun = helper.srun_argv(settings, "toolkit-doctor", *checks.JOB_FLAGS) if on_node else ()
    facts = checks.gather(helper.helper_environment(os.environ), srun=srun, image=image or "")
    found = checks.judge(facts)
    if as_json:
        shown = {
            "checks": [dataclasses.asdict(check) for check in found],
            "facts": dataclasses.asdict(facts),
        }
        print(json.dumps(shown, indent=2))
    else:
        for check in found:
            print(check.line())
    if save:
        if facts.slurm is not None:
            message(f"nothing is saved: {facts.slurm}")
        else:
            name = checks.save(facts, cwd / config.FILE_NAME)
            message(f"saved as [clusters.{name}] in {config.FILE_NAME}")
    if checks.failed(found):
        raise typer.Exit(UnavailableError.exit_code)
