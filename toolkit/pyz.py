"""Pack the entrypoint into the one file that every target starts."""

from __future__ import annotations

import importlib.util
import marshal
import os
import tempfile
import zipfile
from pathlib import Path

import toolkit

MAIN = "from toolkit.entrypoint.__main__ import main\n\nmain()\n"


def write_entrypoint(path: Path) -> None:
    """Write ``toolkit.entrypoint`` to ``path`` as a zipapp, whole or not at all.

    It is started as ``python3 -I -S entrypoint.pyz [--show] [--hostlist EXPR] [-- COMMAND...]``
    by any Python from 3.8 on, from a read-only root too. The same sources, packed by the same
    Python, give the same bytes.

    Raises:
        OSError: ``path`` cannot be written.
    """
    package = Path(toolkit.__file__).parent
    sources = [package / "__init__.py", *sorted((package / "entrypoint").rglob("*.py"))]
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file, zipfile.ZipFile(file, "w") as archive:
            # Stored, not deflated: a Python without zlib can read it, and it starts sooner.
            archive.writestr(zipfile.ZipInfo("__main__.py"), MAIN)
            for source in sources:
                inside = source.relative_to(package.parent).as_posix()
                text = source.read_bytes()
                archive.writestr(zipfile.ZipInfo(inside), text)
                archive.writestr(zipfile.ZipInfo(f"{inside}c"), compiled(text, inside))
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def compiled(source: bytes, inside: str) -> bytes:
    """The ``.pyc`` of ``source``, which halves what the entrypoint adds to a process.

    A Python of another version sees by the magic number that it is not for it, and compiles the
    source beside it.
    """
    code = compile(source, inside, "exec", dont_inherit=True, optimize=0)
    hash_based = (1).to_bytes(4, "little")  # valid whatever the time stamps say; PEP 552
    header = importlib.util.MAGIC_NUMBER + hash_based + importlib.util.source_hash(source)
    return header + marshal.dumps(code)
