"""Running another program for what it says, with a limit."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


@dataclass(frozen=True)
class Captured:
    """How a program ended. ``code`` is None where it could not be run, or took too long."""

    code: int | None
    stdout: str = ""
    stderr: str = ""
    why: str = ""  #: why there is no code

    @property
    def ok(self) -> bool:
        return self.code == 0

    def said(self) -> str:
        """What it complained of, on one line; else why there is nothing."""
        text = self.stderr.strip() or self.stdout.strip()
        return "; ".join(text.splitlines()) or self.why or f"it ended with code {self.code}"


def capture(
    argv: Sequence[str],
    limit_s: float,
    environ: Mapping[str, str] | None = None,
    *,
    cwd: Path | None = None,
    text: str | None = None,
) -> Captured:
    """Run a program to its end, or for ``limit_s`` seconds; it never raises.

    Args:
        argv: the program, found on the PATH of ``environ``, and its arguments.
        limit_s: after so long it is killed.
        environ: its environment; this process's own when None.
        cwd: where it runs.
        text: its standard input; nothing when None.
    """
    given: dict[str, object] = {"stdin": subprocess.DEVNULL} if text is None else {"input": text}
    try:
        ran = subprocess.run(
            argv, env=None if environ is None else dict(environ), cwd=cwd, capture_output=True,
            text=True, errors="replace", timeout=limit_s, check=False, **given,  # type: ignore[call-overload]
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Captured(None, why=f"{argv[0]} did not answer within {limit_s:g} s")
    except OSError as error:
        return Captured(None, why=f"{argv[0]} cannot be run: {error.strerror}")
    return Captured(ran.returncode, ran.stdout, ran.stderr)
