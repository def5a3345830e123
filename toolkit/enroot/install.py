"""Installing the files of ``enroot/`` where enroot reads them, and removing them again."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from toolkit.entrypoint.run_files import write_whole
from toolkit.errors import UnavailableError, UsageError

if TYPE_CHECKING:
    from toolkit.enroot.site import Site

Scope = Literal["user", "system"]

#: What every installed file begins with, so that nobody else's is replaced or removed.
MARK = "# Installed by toolkit"
USER = ("hooks.d", "environ.d", "mounts.d")
SYSTEM = (*USER, "enroot.conf.d")
MODES = {"hooks.d": 0o755}


@dataclass(frozen=True)
class Step:
    """One file: what is to be done about it."""

    action: Literal["write", "keep", "remove"]
    path: Path
    why: str
    content: str = ""
    mode: int = 0o644


def files() -> Path:
    """Where the files are: in the package, or beside it in a checkout."""
    package = Path(__file__).parents[1]
    for folder in (package / "enroot" / "files", package.parent / "enroot"):
        if (folder / "hooks.d").is_dir():
            return folder
    raise UnavailableError("this installation of toolkit lacks the files of enroot/.")


def target(site: Site, scope: Scope) -> Path:
    name = "ENROOT_CONFIG_PATH" if scope == "user" else "ENROOT_SYSCONF_PATH"
    return site.path(name)


def plan(source: Path, folder: Path, scope: Scope, *, remove: bool = False) -> list[Step]:
    """What is to be done to install, or remove, the files.

    Args:
        source: the folder of :func:`files`.
        folder: where they go.
        scope: a user has no ``enroot.conf.d``.
        remove: take them away instead.

    Raises:
        UsageError: Where a file that is not the toolkit's has the name of one.
    """
    steps = []
    for part in SYSTEM if scope == "system" else USER:
        for path in sorted((source / part).iterdir()):
            content = path.read_text(encoding="utf-8")
            there = folder / part / path.name
            mode = MODES.get(part, 0o644)
            steps.append(_step(there, content, mode, remove=remove))
    return [step for step in steps if step.action != "keep" or not remove]


def _step(there: Path, content: str, mode: int, *, remove: bool) -> Step:
    try:
        old = there.read_text(encoding="utf-8")
    except FileNotFoundError:
        old = None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{there} cannot be read ({error}); nothing was done.") from error
    if old is not None and not any(line.startswith(MARK) for line in old.splitlines()):
        raise UsageError(f"{there} is not the toolkit's: move it away first. Nothing was done.")
    if remove:
        return Step("keep" if old is None else "remove", there, "is removed")
    if old == content and there.stat().st_mode & 0o777 == mode:
        return Step("keep", there, "is up to date")
    return Step("write", there, "is new" if old is None else "is replaced", content, mode)


def apply(steps: list[Step]) -> None:
    """Do it, each file whole or not at all.

    Raises:
        UnavailableError: Where the folder cannot be written.
    """
    for step in steps:
        try:
            if step.action == "remove":
                step.path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # other files are in it
                    step.path.parent.rmdir()
            elif step.action == "write":
                step.path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(step.path, step.content, step.mode)
        except OSError as error:
            msg = (
                f"{step.path} cannot be changed: {error.strerror}. --system takes an administrator;"
                " --user installs for yourself."
            )
            raise UnavailableError(msg) from error
