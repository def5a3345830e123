"""Command-line options of workloads."""

from __future__ import annotations

import argparse
import math
from typing import NoReturn

from workloads.common.errors import WorkloadError


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are said once, by rank 0, and not by every rank.

    Options are written in full: a shortened one would change its meaning when another is added.
    """

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print.

        Raises:
            WorkloadError: Always.
        """
        raise WorkloadError(f"{message} (--help lists the options)")


def positive(text: str) -> int:
    """Read an integer of 1 or more, of at most 63 bits."""
    return _integer(text, 1)


def natural(text: str) -> int:
    """Read an integer of 0 or more, of at most 63 bits."""
    return _integer(text, 0)


def _integer(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value >= 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is too large")
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of {least} or more")
    return value


def integers(text: str) -> tuple[int, ...]:
    """Read integers of 1 or more, separated by commas, such as ``10,5``."""
    return tuple(positive(part) for part in text.split(","))


def positive_float(text: str) -> float:
    """Read a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def share(text: str) -> float:
    """Read a number from 0 to below 1."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to below 1")
    return value


def process_options(parser: argparse.ArgumentParser) -> None:
    """Add what every workload has: the device, and how long to wait for the other ranks."""
    add = parser.add_argument_group("processes").add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add(
        "--timeout",
        type=positive_float,
        default=600,
        metavar="SECONDS",
        help="how long a rank waits for the others in a step (600)",
    )
