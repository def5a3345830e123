"""``toolkit doctor``: what this machine and the cluster can do, and what to mend."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Annotated

import typer

from toolkit import config
from toolkit.commands.import_image import node_environment
from toolkit.commands.options import Cluster
from toolkit.commands.view import message
from toolkit.errors import UnavailableError, UsageError


def doctor(
    *,
    image: Annotated[
        str | None, typer.Option("--image", "--container-image", help="Look at this image, too.")
    ] = None,
    on: Annotated[
        str, typer.Option(help="here; or slurm: ask a compute node as well, with a short job.")
    ] = "here",
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
    from toolkit.enroot import doctor as checks

    if on not in {"here", "slurm"}:
        raise UsageError(f"--on {on}: a check runs here, or on slurm as well.")
    cwd = Path.cwd()
    settings = config.settings(
        {"partition": partition, "account": account}, os.environ, cwd, cluster
    )
    flags = [
        f"--{name}={settings[name].value}"
        for name in ("partition", "account", "qos", "constraint")
        if name in settings
    ]
    facts = checks.gather(
        node_environment(), on_node=on == "slurm", srun_flags=flags, image=image or ""
    )
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
