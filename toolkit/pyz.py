"""Pack the entrypoint into the one file that every target starts."""

from __future__ import annotations

import os
import tempfile
import zipfile
from pathlib import Path

import toolkit

MAIN = "from toolkit.entrypoint.__main__ import main\n\nmain()\n"


def write_entrypoint(path: Path) -> None:
    """Write ``toolkit.entrypoint`` to ``path`` as a zipapp, whole or not at all.

    It is started as ``python3 -I -S entrypoint.pyz [--show] [--hostlist EXPR] [-- COMMAND...]``
    by any Python from 3.8 on, from a read-only root too. The same sources give the same bytes.

    Raises:
        OSError: ``path`` cannot be written.
    """
    package = Path(toolkit.__file__).parent
    files = {"__main__.py": MAIN.encode(), "toolkit/__init__.py": _read(package / "__init__.py")}
    for source in sorted((package / "entrypoint").glob("*.py")):
        files[f"toolkit/entrypoint/{source.name}"] = _read(source)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file, zipfile.ZipFile(file, "w") as archive:
            for inside, data in files.items():
                # Stored, not deflated: a Python without zlib can read it, and it starts sooner.
                archive.writestr(zipfile.ZipInfo(inside), data)
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _read(source: Path) -> bytes:
    return source.read_bytes()
