"""Tier slurm: a real cluster of two nodes, which ci/testbed makes where it can."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.testbed import slurm_testbed

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session", autouse=True)
def testbed() -> Iterator[None]:
    """The cluster, for every test of the tier."""
    with slurm_testbed():
        yield
