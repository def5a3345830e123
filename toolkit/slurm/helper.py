"""Jobs beside the training, such as an import on a compute node: what Slurm is told of all of them.

They need a node, not the training job's resources. But they need what the site wants of any job:
an account, a partition, a reservation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.options import table
from toolkit.slurm import environment, srun

if TYPE_CHECKING:
    from collections.abc import Mapping

    from toolkit.config import Setting


def srun_argv(settings: Mapping[str, Setting], name: str, *more: str) -> tuple[str, ...]:
    """The srun in front of a helper's command.

    Args:
        settings: of the project and its cluster, whose training job asks for more than this.
        name: the job's name.
        more: flags of this helper's own.
    """
    wanted = {key: one for key, one in table().items() if one.helper}
    flags = [
        f"--{one.slurm}={settings[key].value}" for key, one in wanted.items() if key in settings
    ]
    said = {one.slurm for key, one in wanted.items() if key in settings}
    arguments = settings["srun_arg"].value if "srun_arg" in settings else ()
    helped = {one.slurm for one in wanted.values()} | {"clusters"}
    flags += [
        f"--{option}={value}"
        for option, value, _ in srun.options(arguments)
        if option in helped - said and value
    ]
    return ("srun", "--nodes=1", "--ntasks=1", f"--job-name={name}", *more, *flags)


def helper_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what an outer job's variables would tell an srun."""
    dropped = environment.outer(environ, step=environment.allocation(environ) is not None)
    return {name: value for name, value in environ.items() if name not in dropped}
