"""The errors a user can meet, and the exit code of each.

Every message is one short paragraph: what is wrong, which value, where it came from, what to do.
``toolkit.cli.main`` prints it on stderr and ends with ``exit_code``. The entrypoint, which may not
import this file, has an error of its own with the same codes.
"""

from __future__ import annotations

from toolkit.entrypoint import codes


class ToolkitError(Exception):
    """An error that is shown to the user as one paragraph."""

    exit_code = codes.BUG


class UsageError(ToolkitError):
    """A wrong option, argument or configuration value."""

    exit_code = codes.USAGE


class BuildError(ToolkitError):
    """An image could not be built."""

    exit_code = codes.BUILD


class PushError(ToolkitError):
    """A push failed, or a registry did not confirm it."""

    exit_code = codes.PUSH


class ImportImageError(ToolkitError):
    """An image could not be imported as a squashfs file."""

    exit_code = codes.IMPORT


class CredentialsError(ToolkitError):
    """Credentials are missing, wrong or expired."""

    exit_code = codes.CREDENTIALS


class UnavailableError(ToolkitError):
    """The machine, cluster or engine lacks something, or the container did not start."""

    exit_code = codes.UNAVAILABLE


class SmokeError(ToolkitError):
    """An image failed its smoke test."""

    exit_code = codes.SMOKE


class CancelledError(ToolkitError):
    """What was going on was cancelled."""

    exit_code = codes.CANCELLED
