"""What is shown while something goes on: plain lines, or Rich's displays on a terminal."""

from __future__ import annotations

import contextlib
import os
import sys
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

from toolkit.entrypoint.finish import parse_metrics

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.progress import Progress, TaskID

    from toolkit.image.buildkit import View as BuildView
    from toolkit.image.push import LayerView
    from toolkit.launch import View as RunView
    from toolkit.run_dir import RunDir


# ---- runs


class PlainRun:
    """Each rank's lines behind its number; nothing else."""

    def __init__(self, stream: IO[str], *, vital: bool = True) -> None:
        self._stream: IO[str] | None = stream
        self._vital = vital

    def line(self, who: str, text: str) -> None:
        if self._stream is None:
            return
        try:
            # One write, so that lines of two ranks do not mix.
            self._stream.write(f"[{who}] {text}\n")
            self._stream.flush()
        except OSError as error:
            if not self._vital:
                raise
            # Nobody reads any more (`| head`), or the terminal is gone: no reason to end a run.
            self._stream = None
            silence()
            message(f"output is shown no more ({error.strerror}); the run goes on")

    def note(self, text: str) -> None:
        message(text)

    def poll(self, run: RunDir) -> None:
        """Show nothing: the workload prints its own progress."""


class LiveRun:
    """The ranks' lines, and below them epoch, loss and throughput as the workload reports them."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID | None = None
        self._offset = 0
        self._seen: dict[str, Any] = {}

    def line(self, who: str, text: str) -> None:
        """Show a line above the display, as it is: no markup, no colours of Rich's own."""
        self._progress.console.out(f"[{who}] {text}", highlight=False)

    def note(self, text: str) -> None:
        self._progress.console.out(f"toolkit: {text}", highlight=False)

    def poll(self, run: RunDir) -> None:
        """Read what ``metrics.jsonl`` has gained and move the display."""
        try:
            with run.metrics_file.open("rb") as file:
                file.seek(self._offset)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return
        self._offset += len(whole) + len(newline)
        for line in whole.decode(errors="replace").splitlines():
            self._seen.update(parse_metrics(line))
        done, total = progress_of(self._seen)
        if total:
            if self._task is None:
                self._task = self._progress.add_task("", total=total)
            self._progress.update(
                self._task, completed=done, total=total, description=summary(self._seen)
            )


def progress_of(seen: dict[str, Any]) -> tuple[float, float]:
    """``(done, total)`` in steps over all epochs; ``(0, 0)`` where the workload reports none."""
    try:
        epoch, epochs = int(seen["epoch"]), int(seen["epochs"])
        step, steps = int(seen.get("step", 0)), int(seen.get("steps", 0))
    except (KeyError, TypeError, ValueError):
        return 0, 0
    steps = max(steps, 1)
    return (epoch - 1) * steps + min(step, steps), epochs * steps


def summary(seen: dict[str, Any]) -> str:
    """Epoch, loss and throughput in one line; what was not reported is left out."""
    parts = [f"epoch {seen.get('epoch')}/{seen.get('epochs')}"]
    for key, label in (("loss", "loss {:.3f}"), ("seeds_per_second", "{:,.0f} seeds/s")):
        if isinstance(seen.get(key), int | float):
            parts.append(label.format(seen[key]))
    return "  ".join(parts)


@contextmanager
def run_view(stream: IO[str], *, vital: bool = True) -> Iterator[RunView]:
    """The view of a run that fits ``stream``: Rich on a terminal, plain lines elsewhere.

    ``vital`` is whether there is more to do than to show: then it goes on where nobody reads.
    """
    if not vital or not stream.isatty():
        yield PlainRun(stream, vital=vital)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(file=stream)) as progress:
        yield LiveRun(progress)


def message(text: str) -> None:
    with contextlib.suppress(OSError):  # a closed stderr is no reason to end anything
        print(f"toolkit: {text}", file=sys.stderr, flush=True)


def silence() -> None:
    """Let what is left for a closed stdout vanish: the interpreter would complain at its end."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


# ---- builds and pushes


class PlainImage:
    """A line for each thing that happens to an image; always on stderr."""

    def step(self, number: int, total: int, text: str) -> None:
        which = f"{number}/{total}" if total else str(number)
        print(f"step {which}: {' '.join(text.split())}", file=sys.stderr, flush=True)

    def line(self, text: str) -> None:
        print(f"  {text}", file=sys.stderr, flush=True)

    def layer(self, layer: str, status: str, done: int, total: int) -> None:
        """Show a layer's state, but not each part of it on its way."""
        if not total:
            print(f"  {layer} {status}", file=sys.stderr, flush=True)
        del done


class LiveImage:
    """One bar for the build's steps, or one for each layer of a push; the last line beside it."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def step(self, number: int, total: int, text: str) -> None:
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
def build_view() -> Iterator[BuildView]:
    with _image_view() as view:
        yield view


@contextmanager
def push_view() -> Iterator[LayerView]:
    with _image_view() as view:
        yield view


@contextmanager
def _image_view() -> Iterator[PlainImage | LiveImage]:
    if not sys.stderr.isatty():
        yield PlainImage()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("{task.fields[last]}", style="dim", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield LiveImage(progress)
