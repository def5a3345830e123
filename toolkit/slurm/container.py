"""pyxis's flags of a container step: image, mounts, workdir, variables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.entrypoint.run_files import IN_CONTAINER
from toolkit.errors import UnavailableError
from toolkit.mounts import Mount

if TYPE_CHECKING:
    from collections.abc import Iterable

    from toolkit.job import Job

#: Flags that every job has, and what goes without them.
_DISPENSABLE = {
    "container-env": "where the image sets a variable too, its value wins over the job's",
    "no-container-mount-home": "the site decides whether the home directory is mounted",
}


def flags(
    job: Job, variables: Iterable[str], suffix: str, *, run_dir: bool = True
) -> tuple[list[str], list[str]]:
    """The flags for a job in a container, and notes about them.

    Args:
        job: the job.
        variables: names that the job's values win for over the image's.
        suffix: makes ``--container-name`` unique to the job.
        run_dir: whether the run directory is mounted.

    Raises:
        UnavailableError: if the cluster's pyxis does not know a flag that the job was given.
    """
    spec, container = job.spec, job.container
    assert container is not None
    mounts = [*container.mounts, *([Mount(str(job.run_dir), IN_CONTAINER)] if run_dir else [])]
    names = ",".join(variables)
    found = [
        f"--container-image={container.image.pyxis()}",
        f"--container-mounts={','.join(map(str, mounts))}",
        *([f"--container-workdir={container.workdir}"] if container.workdir else []),
        "--container-mount-home" if spec.container_mount_home else "--no-container-mount-home",
        *(["--container-writable"] if spec.container_writable else []),
        *([f"--container-env={names}"] if names else []),
    ]
    notes = []
    if spec.container_name:
        base, colon, mode = spec.container_name.partition(":")
        found.append(f"--container-name={base}-{suffix}{colon}{mode}")
        notes.append(
            f"--container-name {base}: the first start unpacks the image, and the container stays"
            " on each node after the job; remove it with enroot remove"
        )
    if spec.pyxis_flags:
        found, more = _known(found, spec.pyxis_flags)
        notes += more
    return found, notes


def _known(flags: list[str], known: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """The flags that the cluster's pyxis knows; those that a job can do without are left out.

    Raises:
        UnavailableError: if one is not known that the job was given.
    """
    kept, notes = [], []
    for flag in flags:
        name = flag.removeprefix("--").partition("=")[0]
        if name in known:
            kept.append(flag)
        elif name in _DISPENSABLE:
            notes.append(f"--{name} is unknown to this pyxis (pyxis-flags): {_DISPENSABLE[name]}")
        else:
            msg = (
                f"--{name}: this cluster's pyxis does not know it, says pyxis-flags in"
                " toolkit.toml. Leave it out, or run `toolkit doctor --save` again."
            )
            raise UnavailableError(msg)
    return kept, notes
