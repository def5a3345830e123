"""Tests, by the tier they need: unit runs anywhere, the others need the real thing."""
