"""Running the ``toolkit`` command as a user does."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

TOOLKIT = str(Path(sys.executable).with_name("toolkit"))
LIMIT = 170.0  # seconds; a time limit of Slurm's takes up to 90


def toolkit(cwd: Path, *words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``toolkit WORDS`` in ``cwd`` with the variables ``env`` added."""
    return subprocess.run(
        [TOOLKIT, *words],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """A directory that the test bed's login node and compute nodes share."""
    folder = Path(os.environ["TOOLKIT_TESTBED_SHARED"], f"run-{uuid.uuid4().hex[:8]}")
    folder.mkdir()
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
