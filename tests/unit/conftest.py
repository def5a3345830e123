"""Tier unit: runs anywhere, and so on this machine alone even where a cluster can be reached."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """``toolkit run`` stays here."""
    monkeypatch.setenv("TOOLKIT_ON", "local")
