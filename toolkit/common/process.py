"""Starting and ending processes that others depend on."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from typing import TYPE_CHECKING, Self

from toolkit.entrypoint import codes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


class Signals:
    """Notes SIGINT, SIGTERM and SIGHUP instead of dying of them, so that no rank is left behind."""

    def __init__(self) -> None:
        self.caught: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}

    def _note(self, number: int, _frame: object) -> None:
        self.caught = signal.Signals(number)

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # under nohup, SIGHUP stays ignored
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal() itself returned


def start(
    argv: Sequence[str], env: Mapping[str, str], cwd: Path, stderr: int = subprocess.STDOUT
) -> subprocess.Popen[bytes]:
    """Start a process whose output is read through pipes."""
    return subprocess.Popen(
        argv,
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        start_new_session=True,  # Ctrl-C reaches us alone, and we end the process in our own way
    )


def signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal a process and whatever it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def exit_code(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process; its exit code, 128+n for a signal."""
    return codes.of_signal(process.wait())
