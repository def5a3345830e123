"""``workloads.common.metrics``: what is not seen from a whole run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from workloads.common.metrics import Waiting

if TYPE_CHECKING:
    from collections.abc import Iterator


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
