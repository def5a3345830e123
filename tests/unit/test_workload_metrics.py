"""``workloads.common.metrics``: what is not seen from a whole run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from workloads.common import metrics
from workloads.common.metrics import Progress, Waiting

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest


def late() -> Iterator[int]:
    for number in range(3):
        time.sleep(0.05)
        yield number


def test_waiting_is_told_from_working() -> None:
    waiting, began = Waiting(late()), time.perf_counter()
    seen = []
    for number in waiting:
        seen.append(number)
        time.sleep(0.05)
    assert seen == [0, 1, 2]
    assert 0.15 <= waiting.seconds <= time.perf_counter() - began - 0.15


def test_what_never_comes_is_waited_for_too() -> None:
    def nothing() -> Iterator[int]:
        time.sleep(0.05)
        yield from ()

    waiting = Waiting(nothing())
    assert list(waiting) == []
    assert waiting.seconds >= 0.05


def test_progress_is_told_in_lines_also_while_nothing_gets_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "LINES", 0.0)
    with Progress("preparing x", 4, before=2) as progress:
        progress.reached(2)  # another process is at the third
        progress.reached(3)
    told = capsys.readouterr().err.splitlines()
    assert told[:2] == [
        "preparing x: goes on where it stopped, at 2 of 4 pieces",
        "preparing x: 2 of 4 pieces",
    ]
    assert told[2].startswith("preparing x: 3 of 4 pieces, ")
    assert told[2].endswith(" s to go")
