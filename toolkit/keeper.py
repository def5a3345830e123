"""The process that keeps a run: it starts the ranks, watches them and records how they ended.

It is no child of the terminal: who looks on may be stopped, cut off or killed, and the run goes on,
within its limits, to a recorded end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from typing import TYPE_CHECKING, NoReturn

from toolkit.entrypoint import codes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Keeper:
    """The keeper of a run, as the process that started it sees it."""

    def __init__(self, work: Callable[[], None], log: Path) -> None:
        """Start it.

        Args:
            work: what it does; it ends when this returns.
            log: what it prints goes there, tracebacks too.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        self._ended = False
        if self.pid == 0:
            _become(work, log)

    def ended(self) -> bool:
        """Whether it has ended."""
        if not self._ended:
            try:
                self._ended = os.waitpid(self.pid, os.WNOHANG)[0] != 0
            except ChildProcessError:  # somebody else waited for it
                self._ended = True
        return self._ended

    def signal(self, number: int) -> None:
        """Pass a signal on."""
        if not self.ended():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _become(work: Callable[[], None], log: Path) -> NoReturn:
    code = codes.BUG
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDONLY)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        for source, target in ((nothing, 0), (out, 1), (out, 2)):
            os.dup2(source, target)
        for descriptor in (nothing, out):
            os.close(descriptor)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        work()
        code = 0
    except BaseException:  # noqa: BLE001 - this process ends here, whatever it was
        with contextlib.suppress(OSError):
            os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)
