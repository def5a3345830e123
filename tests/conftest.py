"""What all tiers share."""

from __future__ import annotations

from hypothesis import settings

# How long an example takes says nothing on a shared machine; the time limit of the test stands.
settings.register_profile("toolkit", deadline=None)
settings.load_profile("toolkit")
