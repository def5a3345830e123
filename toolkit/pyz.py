"""Pack the entrypoint into the one file that every target starts."""

from __future__ import annotations

import importlib.util
import io
import marshal
import subprocess
import sys
import zipfile
from pathlib import Path

import toolkit
from toolkit.entrypoint.run_files import write_whole

COMPILE = """
import marshal, sys
sources = marshal.load(sys.stdin.buffer)
codes = [compile(source, name, "exec", optimize=0) for name, source in sources]
sys.stdout.buffer.write(marshal.dumps([marshal.dumps(code) for code in codes]))
"""
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
    paths = [package / "__init__.py", *sorted((package / "entrypoint").rglob("*.py"))]
    sources = {file.relative_to(package.parent).as_posix(): file.read_bytes() for file in paths}
    codes = compile_all(sources)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        # Stored, not deflated: a Python without zlib can read it, and it starts sooner.
        archive.writestr(zipfile.ZipInfo("__main__.py"), MAIN)
        for (inside, source), code in zip(sources.items(), codes, strict=True):
            archive.writestr(zipfile.ZipInfo(inside), source)
            archive.writestr(zipfile.ZipInfo(f"{inside}c"), code)
    write_whole(path, packed.getvalue(), 0o644)


def compile_all(sources: dict[str, bytes]) -> list[bytes]:
    """The ``.pyc`` of each source, which halves what the entrypoint adds to a process.

    A Python of another version sees by the magic number that it is not for it, and compiles the
    source beside it. A Python of its own does this, because the bytes of marshalled code depend on
    what else the process has in memory.
    """
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", COMPILE],
        input=marshal.dumps(list(sources.items())),
        stdout=subprocess.PIPE,
        check=True,
    )
    codes = marshal.loads(done.stdout)  # noqa: S302  it comes from our own process
    hash_based = (1).to_bytes(4, "little")  # valid whatever the time stamps say; PEP 552
    return [
        importlib.util.MAGIC_NUMBER + hash_based + importlib.util.source_hash(source) + code
        for source, code in zip(sources.values(), codes, strict=True)
    ]
