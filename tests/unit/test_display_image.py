"""Bars on a terminal, plain lines elsewhere; text of a build is never taken for markup."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

from toolkit.commands import display

if TYPE_CHECKING:
    import pytest


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def play() -> None:
    with display.build_view() as view:
        view.step(1, 2, "FROM base")
        view.step(2, 2, "RUN echo '[/not-markup]' \\\n  && true")
        view.line("[/neither] this")
    with display.push_view() as layers:
        layers.layer("d5bb", "Pushing", 5, 10)
        layers.layer("d5bb", "Pushed", 0, 0)


def test_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    play()
    assert stream.getvalue().splitlines() == [
        "step 1/2: FROM base",
        "step 2/2: RUN echo '[/not-markup]' \\ && true",
        "  [/neither] this",
        "  d5bb Pushed",
    ]


def test_bars_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    play()
    shown = stream.getvalue()
    assert "\x1b[" in shown
    assert "[/not-markup]" in shown
    assert "[/neither] this" in shown
    assert "d5bb Pushed" in shown
