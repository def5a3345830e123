"""``toolkit shell``: a shell, or one command, in the image on a compute node."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from toolkit import config
from toolkit.commands.options import Cluster, DryRun, Words
from toolkit.commands.run import job
from toolkit.commands.view import message
from toolkit.errors import UnavailableError, UsageError

#: bash where the image has it.
SHELL = ("sh", "-c", "command -v bash >/dev/null && exec bash; exec sh")


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
    import shlex

    from toolkit.enroot import use
    from toolkit.slurm import probe
    from toolkit.slurm.shell import compose

    cwd = Path.cwd()
    settings = config.settings(options, os.environ, cwd, cluster)
    spec = job(settings, list(words or SHELL), explicit_command=True)
    if spec.container_image is None:
        raise UsageError("toolkit shell: name the image with --image or in toolkit.toml.")
    spec = (
        use.known(spec, settings, cwd)
        if dry_run
        else use.imported(spec, settings, cwd, say=message)
    )
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    made = compose(spec, cwd=cwd, environ=os.environ, terminal=terminal)
    for note in made.notes:
        message(note)
    if dry_run:
        for name in made.unset:
            print(f"unset {name}")
        for name, value in spec.env:
            print(f"export {name}={shlex.quote(value)}")
        print(shlex.join(made.argv))
        return
    why = probe.unreachable(os.environ)
    if why is not None:
        raise UnavailableError(f"toolkit shell: {why}. Log in to the cluster first.")
    env = {name: value for name, value in os.environ.items() if name not in made.unset}
    # srun takes this process over: its terminal, its signals and its exit code are the shell's.
    os.execvpe("srun", made.argv, {**env, **dict(spec.env)})  # noqa: S606 - a list, no shell
