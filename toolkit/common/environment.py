"""What of a login node's environment must not come along into a container."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

#: The login node's own software, which breaks programs in a container (PYTHONHOME kills python3 at
#: its start). Names that end in ``_`` stand for all that begin so.
LOGIN_NODE = (
    "PYTHONHOME",
    "PYTHONPATH",
    "PYTHONSTARTUP",
    "PYTHONUSERBASE",
    "PYTHONEXECUTABLE",
    "PYTHONPLATLIBDIR",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "LD_AUDIT",
    "VIRTUAL_ENV",
    "VIRTUAL_ENV_PROMPT",
    "CONDA_",
    "_CE_",
    "MAMBA_",
)


def left_out(environ: Iterable[str], asked: Collection[str] = ()) -> tuple[str, ...]:
    """Names in ``environ`` that stay out of a container: the login node's, less those asked for."""
    prefixes = tuple(name for name in LOGIN_NODE if name.endswith("_"))
    return tuple(
        name
        for name in environ
        if name not in asked and (name in LOGIN_NODE or name.startswith(prefixes))
    )
