"""What can be learned of the cluster from here, with a limit on every question."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from toolkit.common.capture import capture

if TYPE_CHECKING:
    from collections.abc import Mapping

TIMEOUT_S = 10


def unreachable(environ: Mapping[str, str]) -> str | None:
    """Why no Slurm cluster can be used from here; None where a controller answers."""
    path = environ.get("PATH")
    missing = [name for name in ("srun", "scontrol") if shutil.which(name, path=path) is None]
    if missing:
        return f"{missing[0]} is not on PATH"
    asked = capture(["scontrol", "ping"], TIMEOUT_S, environ)
    if asked.code is None:
        return f"the Slurm controller did not answer within {TIMEOUT_S} s"
    # "Slurmctld(primary) at HOST is UP"; a backup that is down does no harm.
    if " is UP" in asked.stdout:
        return None
    said = (asked.stderr or asked.stdout).strip().splitlines()
    return f"the Slurm controller does not answer{f' ({said[-1]})' if said else ''}"


def has_pyxis(environ: Mapping[str, str]) -> bool:
    """Whether srun here has pyxis's options.

    ``--container`` alone would prove nothing: it is Slurm's own option for OCI bundles.
    """
    return "--container-image" in capture(["srun", "--help"], TIMEOUT_S, environ).stdout
