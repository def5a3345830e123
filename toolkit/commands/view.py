"""How a run is shown while it goes on: plain lines, or a Rich progress display on a terminal."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

from toolkit.entrypoint.finish import parse_metrics

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.progress import Progress, TaskID

    from toolkit.run_dir import RunDir
    from toolkit.targets import View


class PlainView:
    """Each rank's lines behind its number; nothing else."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def line(self, who: str, text: str) -> None:
        """Show a line that a rank printed."""
        # One write, so that lines of two ranks do not mix.
        self._stream.write(f"[{who}] {text}\n")
        self._stream.flush()

    def note(self, text: str) -> None:
        """Show a message of the target's."""
        message(text)

    def poll(self, run: RunDir) -> None:
        """Show nothing: the workload prints its own progress."""


class LiveView:
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
        """Show a message of the target's above the display."""
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
                self._task, completed=done, total=total, description=describe(self._seen)
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


def describe(seen: dict[str, Any]) -> str:
    """Epoch, loss and throughput in one line; what was not reported is left out."""
    parts = [f"epoch {seen.get('epoch')}/{seen.get('epochs')}"]
    for key, label in (("loss", "loss {:.3f}"), ("seeds_per_second", "{:,.0f} seeds/s")):
        if isinstance(seen.get(key), int | float):
            parts.append(label.format(seen[key]))
    return "  ".join(parts)


@contextmanager
def view(stream: IO[str]) -> Iterator[View]:
    """The view that fits ``stream``: Rich where it is a terminal, plain lines elsewhere."""
    if not stream.isatty():
        yield PlainView(stream)
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
        yield LiveView(progress)


def message(text: str) -> None:
    """A message of the toolkit's own."""
    print(f"toolkit: {text}", file=sys.stderr)
