"""The record that each rank leaves in the run directory just before it becomes the command."""

from __future__ import annotations

import os
import time

from toolkit.entrypoint.world import World


def write_record(run_dir: str, world: World) -> None:
    """Write ``ranks/N.json``, whole or not at all: the World, host, pid, and start time.

    No value of the environment goes into it but those of the World itself.

    Raises:
        OSError: it cannot be written.
    """
    folder = os.path.join(run_dir, "ranks")
    os.makedirs(folder, exist_ok=True)
    fields: list[tuple[str, object]] = [
        ("host", os.uname().nodename),
        ("pid", os.getpid()),
        ("started", round(time.time(), 3)),  # seconds since 1970
    ]
    fields += [(name, getattr(world, name)) for name in World.fields]
    text = "{" + ", ".join(f'"{name}": {as_json(value)}' for name, value in fields) + "}\n"
    path = os.path.join(folder, f"{world.rank}.json")
    with open(f"{path}.{os.getpid()}", "wb") as file:
        file.write(text.encode("ascii"))
    os.replace(f"{path}.{os.getpid()}", path)


def as_json(value: object) -> str:
    """A number or a text as JSON, in ASCII; importing json costs more than the whole start."""
    if not isinstance(value, str):
        return str(value)
    shown = ""
    for char in value:
        number = ord(char)
        if " " <= char <= "~" and char not in '"\\':
            shown += char
        elif number < 0x10000:
            shown += f"\\u{number:04x}"
        else:
            number -= 0x10000
            shown += f"\\u{0xD800 + (number >> 10):04x}\\u{0xDC00 + (number & 0x3FF):04x}"
    return f'"{shown}"'
