"""What a workload tells its user when it cannot go on."""

from __future__ import annotations

from toolkit.entrypoint import codes


class WorkloadError(Exception):
    """An error shown as one paragraph, without a traceback.

    Attributes:
        exit_code: one of :mod:`toolkit.entrypoint.codes` (USAGE: configuration or data, too).
    """

    def __init__(self, message: str, exit_code: int = codes.USAGE) -> None:
        super().__init__(message)
        self.exit_code = exit_code
