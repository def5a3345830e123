"""Which process a record means, and whether it still lives.

A process id alone names nobody: it is given to another process later, and means somebody else on
another machine, in another container, or after a reboot.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_PLACE = ("host", "boot", "space")


def identify(pid: int) -> dict[str, object]:
    """What recognises a process later: host, boot, PID namespace, process id and start time."""
    return {**_here(), "pid": pid, "start": _start(pid)}


def lives(recorded: Mapping[str, object]) -> bool | None:
    """Whether the process of :func:`identify` still runs; None where that cannot be told here."""
    pid = recorded.get("pid")
    here = _here()
    if type(pid) is not int or any(
        not here[key] or recorded.get(key) != here[key] for key in _PLACE
    ):
        return None
    start = _start(pid)
    return start is not None and start == recorded.get("start")


def _here() -> dict[str, str]:
    """This machine, its boot, and this PID namespace; empty where the system does not say."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        boot = space = ""
    return {"host": os.uname().nodename, "boot": boot, "space": space}


def _start(pid: int) -> str | None:
    """When a process was started, in ticks since boot; None where there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()
