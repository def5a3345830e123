"""An image's files with torch and PyG: the tier's Debian, and this environment's packages."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

#: Of the packages that `pip install .[workloads,test,lint]` brings, those that no rank needs.
NOT_NEEDED = ("mypy", "mypyc", "ruff*", "_pytest", "hypothesis", "__pycache__", "_editable*")


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
    # What torch's wheels leave to the system, from this machine.
    listed = subprocess.run(["/sbin/ldconfig", "-p"], check=True, capture_output=True, text=True)
    for library in ("libstdc++.so.6", "libgcc_s.so.1"):
        line = next(line for line in listed.stdout.splitlines() if line.split()[:1] == [library])
        path = Path(line.rpartition(" ")[2])
        shutil.copy(path, root / "usr/lib")
    return root
