"""Where a job runs: ``local``, ``slurm`` and ``docker``, each with the same few functions."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from toolkit.job import Job
    from toolkit.plan import Outcome, Plan
    from toolkit.run_dir import RunDir


#: Keeps what a target itself has to say of a run, such as why a job waits.
Note = Callable[[str], None]


class Target(Protocol):
    """The functions that every target's module has."""

    def check(self, job: Job) -> None:
        """Raise UnavailableError where this machine cannot run the job; nothing is started."""

    def plan(self, job: Job) -> Plan:
        """What will be executed."""

    def run(self, job: Job, plan: Plan, run: RunDir, note: Note) -> Outcome:
        """Execute the plan and wait for its end; nothing that was started is left.

        What the ranks print goes into their logs, by themselves.
        """


def load(name: str) -> Target:
    """A target by the name that ``--on`` has for it."""
    module: Any = import_module(f"toolkit.targets.{name}")
    target: Target = module
    return target
