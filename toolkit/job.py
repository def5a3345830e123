"""A job as it was decided: all that a target needs to start it, and nothing left to ask."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from toolkit.entrypoint import run_files

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from toolkit.image.reference import Reference
    from toolkit.mounts import Mount
    from toolkit.options import JobSpec


@dataclass(frozen=True)
class Allocation:
    """A job of Slurm's that we are in. What its variables do not tell is None, or empty."""

    job_id: str
    nodes: int | None
    cpus: tuple[int, ...] = ()  #: of the job, on each node
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Container:
    """The container that ranks run in."""

    image: Reference
    build: str = ""
    """What TOOLKIT_IMAGE_BUILD has to be in it, where that is known."""
    mounts: tuple[Mount, ...] = ()
    workdir: str | None = None
    """Where the command starts; None for the image's own place."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job, decided."""

    spec: JobSpec
    target: str
    """``local``, ``slurm`` or ``docker``."""
    batch: bool = False
    """Whether it is handed to sbatch."""
    cwd: Path
    environ: Mapping[str, str]
    """The caller's."""
    runs: Path
    """The folder of run directories."""
    run_dir: Path
    """Its own: a name that may be taken by another run yet, see :meth:`at`."""
    attempt: str = ""
    """Ends the name of the rendezvous file: torch never meets at one that another attempt left."""
    record: Mapping[str, Any] = field(default_factory=dict)
    """What ``run.json`` keeps."""
    container: Container | None = None
    allocation: Allocation | None = None
    """The job of Slurm's that this one is a step of."""
    unset: tuple[str, ...] = ()
    """Names in ``environ`` that must reach neither Slurm's commands nor the ranks."""
    left_out: tuple[str, ...] = ()
    """Names in ``environ`` that must not reach a container."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Variables of ``environ`` under the names that they have by now."""
    notes: tuple[str, ...] = ()
    """What the user should know."""
    why: str = ""
    """Why it runs there."""
    host_python: str = sys.executable

    def at(self, run_dir: Path, attempt: str = "") -> Job:
        """The job in this run directory."""
        return dataclasses.replace(self, run_dir=run_dir, attempt=attempt)

    @property
    def workload(self) -> bool:
        """Whether the code of the built-in workloads travels with it."""
        return self.spec.workload is not None

    @property
    def seen_run_dir(self) -> str:
        """The run directory as the ranks see it."""
        return run_files.IN_CONTAINER if self.container else str(self.run_dir)

    @property
    def python(self) -> str:
        """The interpreter of entrypoint and workloads."""
        return "python3" if self.container else self.host_python

    @property
    def command(self) -> tuple[str, ...]:
        """What a rank becomes."""
        spec = self.spec
        if spec.workload is None:
            return spec.command
        workloads = f"{self.seen_run_dir}/{run_files.WORKLOADS}"
        return (self.python, workloads, spec.workload, *spec.workload_args)

    @property
    def entrypoint(self) -> tuple[str, ...]:
        """What stands in front of a rank; isolated, so that no folder of the user's breaks it."""
        return (self.python, "-I", "-S", f"{self.seen_run_dir}/{run_files.ENTRYPOINT}")

    def variables(self) -> dict[str, str]:
        """What is set for the ranks, whatever the target; the user's own come last."""
        own = {
            "TOOLKIT_TARGET": self.target,
            "TOOLKIT_RUN_DIR": self.seen_run_dir,
            "PYTHONUNBUFFERED": "1",
        }
        if self.container and self.spec.container_mount_home:
            own["PYTHONNOUSERSITE"] = "1"  # ~/.local is the login node's, for another Python
        if self.container and self.container.build:
            own["TOOLKIT_EXPECTED_BUILD"] = self.container.build
        if self.spec.rendezvous == "file":
            meet = f"{self.seen_run_dir}/{run_files.RENDEZVOUS}{self.attempt}"
            own["TOOLKIT_INIT_METHOD"] = f"file://{meet}"
        return {**own, **self.renamed, **self.spec.env_values}
