"""An image's files with torch and PyG: the tier's Debian, and this environment's packages."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

#: Of the packages that `pip install .[workloads,test,lint]` brings, those that no rank needs.
NOT_NEEDED = (
    "mypy*",
    "ruff*",
    "*pytest*",
    "hypothesis*",
    "__pycache__",
    "__editable__*",
    "toolkit*",
)


def unpack(image: Path, folder: Path) -> Path | None:
    """The root directory, below ``folder``; None where the image's Python is another release."""
    root = folder / "root"
    subprocess.run(
        ["unsquashfs", "-no-progress", "-quiet", "-d", root, image],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    if not (root / "usr/bin" / version).exists():
        return None
    packages = Path(sysconfig.get_path("purelib"))
    shutil.copytree(
        packages,
        root / "usr/local/lib" / version / "dist-packages",
        ignore=shutil.ignore_patterns(*NOT_NEEDED),
        symlinks=True,
        dirs_exist_ok=True,
    )
    return root
