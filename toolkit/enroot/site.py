"""enroot as it is installed on this machine, and its settings."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.common.capture import capture

if TYPE_CHECKING:
    from collections.abc import Mapping

TIMEOUT_S = 10
DEFAULT_SYSCONF = "/etc/enroot"

#: What enroot reads in its configuration (KEY VALUE or KEY=VALUE), with its own defaults where we
#: need them. A variable of the environment wins over the file, an earlier file over a later one.
#: Source: enroot 3.5 and 4.1, the program itself.
READ = r"""
load() {
    [ -e "$1" ] || return 0
    while IFS=$' \t=' read -r key value; do
        if [[ "$key" =~ ^ENROOT_[[:upper:]_]+$ ]]; then
            [ -n "${!key-}" ] || export "$key=$(eval echo "$value" 2>/dev/null)"
        fi
    done <"$1"
}
load "$1/enroot.conf"
for file in "$1"/enroot.conf.d/*.conf; do load "$file"; done
default() { [ -n "${!1-}" ] || export "$1=$2"; }
default XDG_DATA_HOME "$HOME/.local/share"
default XDG_CONFIG_HOME "$HOME/.config"
default XDG_CACHE_HOME "$HOME/.cache"
default XDG_RUNTIME_DIR /run
default ENROOT_SYSCONF_PATH "$1"
default ENROOT_RUNTIME_PATH "$XDG_RUNTIME_DIR/enroot"
default ENROOT_CONFIG_PATH "$XDG_CONFIG_HOME/enroot"
default ENROOT_CACHE_PATH "$XDG_CACHE_HOME/enroot"
default ENROOT_DATA_PATH "$XDG_DATA_HOME/enroot"
default ENROOT_TEMP_PATH "${TMPDIR:-/tmp}"
env -0
"""
_FALSE = re.compile(r"|no?|N[oO]?|[fF](alse)?|FALSE")


@dataclass(frozen=True)
class Site:
    """enroot on this machine; without a program, the settings are its defaults."""

    program: str | None
    version: tuple[int, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)

    def path(self, name: str) -> Path:
        """A directory among the settings, such as ``ENROOT_CACHE_PATH``."""
        return Path(self.settings[name])

    def on(self, name: str) -> bool:
        """Whether a switch such as ``ENROOT_ALLOW_HTTP`` is set, as enroot reads it."""
        return not _FALSE.fullmatch(self.settings.get(name, ""))

    @property
    def credentials(self) -> Path:
        return self.path("ENROOT_CONFIG_PATH") / ".credentials"


def find(environ: Mapping[str, str]) -> Site:
    """What is installed, with the settings that it would take in ``environ``."""
    program = shutil.which("enroot", path=environ.get("PATH"))
    sysconf = _sysconf(program) if program else DEFAULT_SYSCONF
    version = _version(program, environ) if program else ()
    return Site(program, version, _settings(sysconf, environ))


def _sysconf(program: str) -> str:
    """The directory of the configuration is compiled into the program, a bash script."""
    try:
        text = Path(program).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return DEFAULT_SYSCONF
    found = re.search(r'^config::init "(.*)/enroot\.conf"$', text, re.MULTILINE)
    return found[1] if found else DEFAULT_SYSCONF


def _version(program: str, environ: Mapping[str, str]) -> tuple[int, ...]:
    ran = capture([program, "version"], TIMEOUT_S, environ)
    found = re.search(r"\d+(\.\d+)+", ran.stdout)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def _settings(sysconf: str, environ: Mapping[str, str]) -> dict[str, str]:
    home = {"HOME": os.path.expanduser("~")}  # noqa: PTH111 - also without HOME in the environment
    ran = capture(["bash", "-c", READ, "bash", sysconf], TIMEOUT_S, {**home, **environ})
    if ran.code is None:
        config = environ.get("ENROOT_CONFIG_PATH") or f"{home['HOME']}/.config/enroot"
        return {"ENROOT_SYSCONF_PATH": sysconf, "ENROOT_CONFIG_PATH": config}
    pairs = (item.split("=", 1) for item in ran.stdout.split("\0") if "=" in item)
    return {name: value for name, value in pairs if name.startswith("ENROOT_")}
