"""An image with torch and PyG: the tier's Debian, and this environment's packages."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
#: Of the packages that `pip install .[workloads,test,lint]` brings, those that no rank needs.
NOT_NEEDED = ("mypy", "mypyc", "*__mypyc*.so", "ruff*", "_pytest", "hypothesis", "_editable*")
#: What is in torch's wheel for those who build on it: a quarter of its files.
NOT_RUN = ("torch/include", "torch/test")


def suits(image: Path) -> bool:
    """Whether the image's Python is of the release that this environment's packages are for."""
    listed = subprocess.run(
        ["unsquashfs", "-l", image, f"usr/bin/{PYTHON}"], capture_output=True, text=True, check=True
    )
    return PYTHON in listed.stdout


def packages(leave_out: Sequence[str] = ()) -> list[str]:
    """The command that writes this environment's packages as a tar of an image's layer."""
    # What torch's wheels leave to the system comes from this machine.
    listed = subprocess.run(["/sbin/ldconfig", "-p"], check=True, capture_output=True, text=True)
    libraries: list[str] = []
    for name in ("libstdc++.so.6", "libgcc_s.so.1"):
        line = next(line for line in listed.stdout.splitlines() if line.split()[:1] == [name])
        libraries += ["-C", str(Path(line.rpartition(" ")[2]).parent), name]
    return [
        "tar", "-c", "--dereference",
        *(f"--exclude={pattern}" for pattern in (*NOT_NEEDED, *leave_out)),
        f"--transform=s,^\\./,usr/local/lib/{PYTHON}/dist-packages/,",
        "--transform=s,^lib,usr/lib/lib,",
        "-C", sysconfig.get_path("purelib"), ".", *libraries,
    ]  # fmt: skip


def unpack(image: Path, folder: Path) -> Path | None:
    """The root directory, below ``folder``; None where the image's Python is another release."""
    if not suits(image):
        return None
    root = folder / "root"
    subprocess.run(
        ["unsquashfs", "-no-progress", "-quiet", "-d", root, image],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    with subprocess.Popen(packages(), stdout=subprocess.PIPE) as writing:
        subprocess.run(["tar", "-x", "-C", root], stdin=writing.stdout, check=True)
    return root
