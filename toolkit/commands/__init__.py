"""Typer commands: each reads options, calls one room, and renders what comes back."""
