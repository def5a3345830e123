"""How a build and a push are shown: plain lines, or bars on a terminal; always on stderr."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.progress import Progress, TaskID

    from toolkit.image.push import LayerView
    from toolkit.image.stream import View


class Plain:
    """A line for each thing that happens."""

    def step(self, number: int, total: int, text: str) -> None:
        """Show that a step of a build has begun."""
        which = f"{number}/{total}" if total else str(number)
        print(f"step {which}: {' '.join(text.split())}", file=sys.stderr, flush=True)

    def line(self, text: str) -> None:
        """Show a line that a step printed."""
        print(f"  {text}", file=sys.stderr, flush=True)

    def layer(self, layer: str, status: str, done: int, total: int) -> None:
        """Show a layer's state, but not each part of it on its way."""
        if not total:
            print(f"  {layer} {status}", file=sys.stderr, flush=True)
        del done


class Live:
    """One bar for the build's steps, or one for each layer of a push; the last line beside it."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def step(self, number: int, total: int, text: str) -> None:
        """Move the bar to a step."""
        shown = " ".join(text.split())[:70]
        task = self._task("build")
        self._progress.update(
            task, completed=number - 1, total=total or None, description=shown, last=""
        )

    def line(self, text: str) -> None:
        """Show the last line that the step printed."""
        self._progress.update(self._task("build"), last=text.strip()[:60])

    def layer(self, layer: str, status: str, done: int, total: int) -> None:
        """Move a layer's bar; a layer that is through is full."""
        task = self._task(layer)
        self._progress.update(task, description=f"{layer} {status}", last="")
        if total:
            self._progress.update(task, completed=done, total=max(total, done))
        elif status in {"Pushed", "Layer already exists"}:
            self._progress.update(task, completed=1, total=1)

    def _task(self, key: str) -> TaskID:
        if key not in self._tasks:
            self._tasks[key] = self._progress.add_task(key, total=None, last="")
        return self._tasks[key]


@contextmanager
def shown() -> Iterator[View]:
    """A view of a build, for as long as it lasts."""
    with _view() as view:
        yield view


@contextmanager
def layers_shown() -> Iterator[LayerView]:
    """A view of a push, for as long as it lasts."""
    with _view() as view:
        yield view


@contextmanager
def _view() -> Iterator[Plain | Live]:
    if not sys.stderr.isatty():
        yield Plain()
        return
    from rich.console import Console  # noqa: PLC0415 - only on a terminal
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("{task.fields[last]}", style="dim", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield Live(progress)
