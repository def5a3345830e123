"""What the two builders' streams have in common: where progress goes, and how a failure reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

TAIL = 20  # lines of a failing step that an error shows


class View(Protocol):
    """Where the progress of a build is shown."""

    def step(self, number: int, total: int, text: str) -> None:
        """Show that a step has begun; ``total`` is 0 where the builder does not say."""

    def line(self, text: str) -> None:
        """Show a line that a step printed."""


def step_failed(step: str, error: str, tail: Iterable[str]) -> str:
    """The message for a build that failed at ``step`` (empty: before the first one)."""
    where = f"the build failed at {step}" if step else "the build failed before its first step"
    lines = "".join(f"\n  {line}" for line in tail)
    return f"{where}: {error.strip()}{lines and '; its last lines:'}{lines}"


def short(text: str, width: int = 100) -> str:
    """``text`` on one line, cut where it is long."""
    text = " ".join(text.split())
    return text if len(text) <= width else f"{text[: width - 1]}…"
