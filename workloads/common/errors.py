"""What a workload tells its user when it cannot go on."""

from __future__ import annotations


class WorkloadError(Exception):
    """An error shown as one paragraph, without a traceback.

    Attributes:
        exit_code: What the process ends with (2: usage, configuration or data).
    """

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code
