"""Command-line options of workloads."""

from __future__ import annotations

import argparse
from typing import NoReturn

from workloads.common.errors import WorkloadError


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are said once, by rank 0, and not by every rank."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print.

        Raises:
            WorkloadError: Always.
        """
        raise WorkloadError(f"{message} (--help lists the options)")


def positive(text: str) -> int:
    """Read an integer of 1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not 1 or more")
    return value


def integers(text: str) -> tuple[int, ...]:
    """Read positive integers separated by commas, such as ``10,5``."""
    return tuple(positive(part) for part in text.split(","))
