"""Where a job runs: ``local``, ``slurm`` and ``docker``, each with the same few functions.

A target is a module with ``NAME``, ``plan`` (what will be executed), ``check`` (whether it can be)
and ``run`` (do it).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from toolkit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from toolkit.config import Setting
    from toolkit.job import JobSpec, Outcome, Plan
    from toolkit.run_dir import RunDir

TARGETS = ("local", "slurm")


class View(Protocol):
    """Where a run's output and progress go."""

    def line(self, who: str, text: str) -> None:
        """Show a line that ``rank N`` printed; called from several threads."""

    def note(self, text: str) -> None:
        """Show what the target itself has to say, such as why a job waits."""

    def poll(self, run: RunDir) -> None:
        """Show what the workload reported since the last call."""


class Target(Protocol):
    """The functions that every target has."""

    NAME: str

    def plan(
        self,
        spec: JobSpec,
        path: Path,
        *,
        cwd: Path,
        environ: Mapping[str, str],
        record: Mapping[str, Any],
    ) -> Plan:
        """What will be executed for ``spec``, in the run directory ``path``."""

    def check(self, spec: JobSpec) -> None:
        """Raise UnavailableError where this machine cannot run the job."""

    def run(
        self, spec: JobSpec, plan: Plan, run: RunDir, view: View, environ: Mapping[str, str]
    ) -> Outcome:
        """Execute the plan and wait for its end."""


def choose(setting: Setting | None, environ: Mapping[str, str]) -> tuple[Target, str]:
    """The target that ``--on`` names, or that ``auto`` finds, and why.

    Raises:
        UsageError: if the name is unknown.
    """
    if setting is not None and setting.value in TARGETS:
        return _load(setting.value), f"asked for by {setting.source}"
    if setting is not None and setting.value != "auto":
        raise UsageError(f"{setting.source}: must be auto, {', '.join(TARGETS)}.")
    from toolkit.slurm import probe  # noqa: PLC0415 - only "auto" asks

    why = probe.unreachable(environ)
    if why is None:
        return _load("slurm"), "a Slurm controller answers"
    return _load("local"), f"no Slurm here: {why}"


def _load(name: str) -> Target:
    module: Any = import_module(f"toolkit.targets.{name}")
    target: Target = module
    return target
