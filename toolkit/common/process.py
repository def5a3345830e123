"""Starting and ending processes that others depend on."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from typing import IO, TYPE_CHECKING, Self

from toolkit.entrypoint import codes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path


class Signals:
    """Notes SIGINT, SIGTERM and SIGHUP instead of dying of them, so that no rank is left behind."""

    def __init__(self, then: Callable[[int], None] | None = None) -> None:
        """Nothing is noted before it is entered; ``then`` is called at once with each signal."""
        self._then = then
        self.caught: signal.Signals | None = None
        self.count = 0
        self._before: dict[signal.Signals, object] = {}

    def _note(self, number: int, _frame: object) -> None:
        self.caught = signal.Signals(number)
        self.count += 1
        if self._then is not None:
            self._then(number)

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # under nohup, SIGHUP stays ignored
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal() itself returned


def start(
    argv: Sequence[str], env: Mapping[str, str], cwd: Path, log: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start a process that prints into an open file, and so does not depend on who reads it."""
    return subprocess.Popen(
        argv,
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C reaches us alone, and we end the process in our own way
    )


def signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal a process and whatever it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def exit_code(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process; its exit code, 128+n for a signal."""
    return codes.of_signal(process.wait())
