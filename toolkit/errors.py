"""The errors a user can meet, and the exit code of each.

Every message is one short paragraph: what is wrong, which value, where it came from, what to do.
``toolkit.cli.main`` prints it on stderr and ends with ``exit_code``; nothing else does.
The entrypoint, which must not import this file, uses the same numbers (71 and 76).
"""

from __future__ import annotations


class ToolkitError(Exception):
    """Base of all errors that are shown to the user as one paragraph."""

    exit_code = 70


class UsageError(ToolkitError):
    """A wrong option, argument or configuration value."""

    exit_code = 2


class RankError(ToolkitError):
    """Ranks or environment variables that do not add up."""

    exit_code = 71


class BuildError(ToolkitError):
    """An image could not be built."""

    exit_code = 72


class PushError(ToolkitError):
    """A push failed, or a registry did not confirm it."""

    exit_code = 73


class ImportImageError(ToolkitError):
    """An image could not be imported as a squashfs file."""

    exit_code = 74


class PreemptedError(ToolkitError):
    """The job was preempted or lost a node: run it again."""

    exit_code = 75


class RendezvousError(ToolkitError):
    """An address or port on which ranks would meet cannot be used."""

    exit_code = 76


class CredentialsError(ToolkitError):
    """Credentials are missing, wrong or expired."""

    exit_code = 77


class UnavailableError(ToolkitError):
    """The machine, cluster or engine lacks something, or the container did not start."""

    exit_code = 78


class SmokeError(ToolkitError):
    """An image failed its smoke test."""

    exit_code = 79


class CancelledError(ToolkitError):
    """The run was cancelled."""

    exit_code = 130
