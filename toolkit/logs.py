"""What a run printed, as it comes: the ranks' logs, what Slurm said, what the toolkit noted.

An attempt of a requeued job is moved aside as a whole; who follows reads it to its end there, and
goes on with the next one.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from toolkit.entrypoint import finish, run_files
from toolkit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from toolkit.run_dir import RunDir

#: How often a log that is followed is looked at.
FOLLOW_S = 0.1
#: Logs opened in a second at most: each costs the shared file system's metadata server a request,
#: and a mere look at a file's size may be answered from an old one.
OPENS_PER_SECOND = 500
TOOLKIT = "toolkit"
SRUN = "srun"
_BEFORE = re.compile(re.escape(run_files.BEFORE_RESTART) + r"(\d+)")


class Logs:
    """What the logs of a run, or of one of its ranks, have gained since the last look."""

    def __init__(self, run: RunDir, rank: int | None = None, name: str = "") -> None:
        """Nothing is read yet.

        Args:
            run: the run; an array's elements are runs of their own.
            rank: only this rank (under torchrun: this node).
            name: stands before every line's origin, where several runs are shown at once.

        Raises:
            UsageError: if the run has no such rank.
        """
        count, task = run.tasks()
        if rank is not None and rank >= count:
            raise UsageError(f"--rank {rank}: {run.path.name} has the logs of {count} {task}s.")
        numbers = range(count) if rank is None else [rank]
        self._run = run
        self._name = f"{name} " if name else ""
        self._names = {run_files.log(number, task): f"{task} {number}" for number in numbers}
        if rank is None:
            others = {run_files.SRUN_LOG: SRUN, run_files.NOTES: TOOLKIT}
            self._names = {**others, **self._names}
        self._task = task
        self._attempt = 0
        self._offsets: dict[str, int] = {}
        self._failed = False
        self.pause = max(FOLLOW_S, len(self._names) / OPENS_PER_SECOND)

    def lines(self, *, ended: bool = False) -> Iterator[tuple[str, str]]:
        """``(origin, line)`` of every whole line that is new; after the end of half a line too.

        The origin is ``rank N`` (under torchrun ``node N``), ``srun`` or ``toolkit``.
        """
        while (restart := self._next_attempt()) is not None:
            folder = self._run.path / f"{run_files.BEFORE_RESTART}{restart}"
            for name in self._names:
                # There it lies without its folder; the toolkit's own log is one for all attempts.
                if name != run_files.NOTES:
                    yield from self._read(name, folder / name.rpartition("/")[2], ended=True)
            self._attempt = restart
            self._offsets = {run_files.NOTES: self._offsets.get(run_files.NOTES, 0)}
            self._failed = False
            yield f"{self._name}{TOOLKIT}", f"attempt {restart + 1} of {self._run.path.name} begins"
        for name in self._names:
            yield from self._read(name, self._run.path / name, ended=ended)

    def _next_attempt(self) -> int | None:
        """The number of the restart that ended the attempt which is being read, if one did."""
        found = [_BEFORE.fullmatch(path.name) for path in self._run.path.iterdir()]
        numbers = sorted(int(match[1]) for match in found if match)
        return next((number for number in numbers if number > self._attempt), None)

    def _read(self, name: str, path: Path, *, ended: bool) -> Iterator[tuple[str, str]]:
        offset = self._offsets.get(name, 0)
        try:
            with path.open("rb") as log:
                log.seek(offset)
                data = log.read()
        except FileNotFoundError:
            return
        if not ended:
            data = data[: data.rfind(b"\n") + 1]
        if not data:
            return
        self._offsets[name] = offset + len(data)
        for line in data.decode(errors="replace").split("\n")[: None if data[-1:] != b"\n" else -1]:
            # Of a progress bar that was drawn again and again, what it came to.
            text = line.rstrip("\r").rpartition("\r")[2]
            if name == run_files.SRUN_LOG:
                yield from self._said(text)
            else:
                yield self._name + self._names[name], text

    def _said(self, text: str) -> Iterator[tuple[str, str]]:
        """What srun passed on for a task, or said itself; how it ended is told by the result."""
        number, text = finish.split_label(text)
        if number is not None:
            yield f"{self._name}{self._task} {number}", text
            return
        self._failed = self._failed or finish.first_event(text) is not None
        if text and not self._failed:
            yield f"{self._name}{SRUN}", text
