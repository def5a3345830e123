"""RANK, WORLD_SIZE and LOCAL_RANK as a user, a container or some other launcher set them."""

from __future__ import annotations

from toolkit.entrypoint.launchers.layout import lay_out_torch
from toolkit.entrypoint.world import EntrypointError, quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from toolkit.entrypoint.world import Ranks, Variables


def read(variables: Variables, forced: bool) -> Ranks | None:  # noqa: FBT001  as every launcher
    """The ranks as given, None where they are only pyxis's in a batch script.

    Raises:
        EntrypointError: the set is partial or contradicts itself.
    """
    if not forced:
        if set_by_pyxis(variables):
            return None
        names = ("WORLD_SIZE", "RANK", "LOCAL_RANK")
        found = [name for name in names if variables.get(name)]
        if len(found) < len(names):
            missing = " and ".join(name for name in names if name not in found)
            shown = " and ".join(f"{name}={quote(variables.get(name) or '')}" for name in found)
            raise EntrypointError(
                f"{shown} but not {missing}: half a set of rank variables, and no launcher's that "
                f"would complete it; set {missing}, or unset {' and '.join(found)}."
            )
    return lay_out_torch(variables, "env")


def set_by_pyxis(variables: Variables) -> bool:
    """Whether RANK and the like are only what pyxis puts in a batch script's container.

    Where the image has PYTORCH_VERSION, pyxis sets RANK and LOCAL_RANK from SLURM_PROCID and
    SLURM_LOCALID, and enroot's hook WORLD_SIZE from SLURM_NTASKS: all of it true in a step, none
    of it in the batch script, whose other ranks do not exist.
    """
    return (
        bool(variables.get("PYTORCH_VERSION") and variables.get("SLURM_PROCID"))
        and variables.get("RANK") == variables.get("SLURM_PROCID")
        and variables.get("LOCAL_RANK") == variables.get("SLURM_LOCALID")
        and variables.get("WORLD_SIZE") in (None, variables.get("SLURM_NTASKS"))
        and not variables.get("LOCAL_WORLD_SIZE")
    )
