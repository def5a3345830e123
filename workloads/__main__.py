"""Start a workload by its name: ``python3 PATH/TO/workloads NAME [ARGUMENTS]``.

The toolkit copies this folder and ``toolkit/entrypoint/`` side by side into the run directory and
starts it there by path, so that neither has to be installed in the image.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
NEEDED = ("numpy", "torch")
NEEDED_BESIDES = {"sage": ("torch_geometric",)}


def main() -> int:
    """Check what can be checked without importing torch, then become the workload."""
    # Python puts this folder (started by path) or the user's (python -m) first, where a folder
    # called `toolkit` or `workloads` would be taken for ours.
    sys.path[0] = str(HERE.parent)
    from toolkit.entrypoint import codes  # noqa: PLC0415

    known = sorted(file.stem for file in HERE.glob("*.py") if not file.stem.startswith("_"))
    if len(sys.argv) < 2 or sys.argv[1] not in known:
        asked = f"no workload {sys.argv[1]!r}" if len(sys.argv) > 1 else "no workload named"
        return _fail(f"workloads: {asked}; there is: {', '.join(known)}", codes.USAGE)
    name = sys.argv.pop(1)
    needed = (*NEEDED, *NEEDED_BESIDES.get(name, ()))
    missing = [module for module in needed if importlib.util.find_spec(module) is None]
    if missing:
        return _fail(
            f"{name}: this Python ({sys.executable}) has no {' and no '.join(missing)}; take a "
            f"container image that has them, or install them here: "
            f"pip install 'pyg-slurm-toolkit[workloads]'",
            codes.UNAVAILABLE,
        )
    runpy.run_module(f"workloads.{name}", run_name="__main__", alter_sys=True)
    return 0


def _fail(message: str, exit_code: int) -> int:
    """Say what all ranks find alike once, on rank 0; the others end a second later."""
    from toolkit.entrypoint import EntrypointError, resolve  # noqa: PLC0415

    try:
        rank = resolve(os.environ).rank
    except EntrypointError:
        rank = 0
    if rank:
        time.sleep(1)
    else:
        print(message, file=sys.stderr)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
