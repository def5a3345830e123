"""Generated texts as they are meant to be; ``UPDATE_GOLDEN=1 pytest`` writes them anew."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def check_golden(name: str, text: str) -> None:
    """Compare a script with the file ``name``, and have shellcheck read it."""
    path = FOLDER / name
    text = re.sub(re.escape(sys.executable), "/venv/bin/python", text)
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.write_text(text)
    assert text == path.read_text()
    shellcheck(text)


def shellcheck(script: str) -> None:
    """Have shellcheck read a script; skip where it is not installed."""
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed (ci/shellcheck installs it)")
    ran = subprocess.run(
        ["shellcheck", "-"], input=script, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout
