"""``toolkit enroot``: files of the toolkit's that enroot reads."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.commands.display import message

if TYPE_CHECKING:
    from toolkit.enroot.install import Scope

app = typer.Typer(
    name="enroot",
    help="Install, or remove, a hook that sets rank variables, and recommended settings.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

System = Annotated[
    bool,
    typer.Option("--system/--user", help="For all users of this node, or for yourself [--user]."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done; do nothing.")]


@app.command()
def install(*, system: System = False, dry_run: DryRun = False) -> None:
    """Install the hook, environment and mounts, and for --system the configuration.

    The system's folder must be the same on every compute node; a user's is in the home directory.
    """
    _do("system" if system else "user", dry_run=dry_run, remove=False)


@app.command()
def remove(*, system: System = False, dry_run: DryRun = False) -> None:
    """Remove what install made; nothing else is touched."""
    _do("system" if system else "user", dry_run=dry_run, remove=True)


def _do(scope: Scope, *, dry_run: bool, remove: bool) -> None:
    from toolkit.enroot import install, site

    folder = install.target(site.find(os.environ), scope)
    steps = install.plan(install.files(), folder, scope, remove=remove)
    if not dry_run:
        install.apply(steps)
    for step in steps:
        print(f"{step.path} {step.why}")
    if not steps:
        message(f"nothing of the toolkit's is in {folder}")
    if dry_run:
        message("a dry run: nothing was done")
    elif scope == "user" and not remove:
        message("the settings of enroot.conf are the administrator's: see --system --dry-run")
