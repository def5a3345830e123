"""A new image from an old one on a machine without Docker: packages added by enroot itself."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.common.environment import left_out
from toolkit.common.secrets import hide_logins
from toolkit.enroot.images import SQUASH_OPTIONS, squashfs_problem
from toolkit.enroot.importing import LIMIT_S, SQUASHED, UNPACKED, Need, check_space, run_enroot
from toolkit.errors import ImportImageError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from toolkit.enroot.site import Site

#: Where an image keeps what was added to it: one JSON object a line, the newest last.
RECORD = "/etc/toolkit-customized.jsonl"


@dataclass(frozen=True)
class Additions:
    """What is added, in this order."""

    apt: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()
    requirements: str = ""
    """The text of a requirements file."""
    script: str = ""
    """The text of a script, run last."""

    def as_dict(self) -> dict[str, Any]:
        """What is set of it, without the logins of URLs."""
        found = {name: value for name, value in vars(self).items() if value}
        return {
            name: hide_logins(value)
            if isinstance(value, str)
            else [hide_logins(item) for item in value]
            for name, value in found.items()
        }


def install_script(added: Additions, record: Mapping[str, Any]) -> str:
    """What runs in the container, as its root user, with ``sh``."""
    lines = ["set -eu", "export DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1"]
    # The container is the environment: where a distribution wants a virtual one, there is none.
    lines.append("export PIP_BREAK_SYSTEM_PACKAGES=1 PIP_ROOT_USER_ACTION=ignore")
    lines.append("export PIP_DISABLE_PIP_VERSION_CHECK=1")
    lines += ['fail() { echo "ERROR the image has no $1" >&2; exit 1; }', "work=$(mktemp -d)"]
    if added.apt:
        lines += [
            "command -v apt-get >/dev/null || fail apt-get",
            "apt-get update",
            f"apt-get install --yes --no-install-recommends -- {shlex.join(added.apt)}",
            "rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin",
        ]
    if added.pip or added.requirements:
        # `python` first: in an image with conda or an environment on PATH that is the one meant.
        lines += [
            "python=$(command -v python || command -v python3) || fail python",
            '"$python" -m pip --version >/dev/null 2>&1 || fail pip',
        ]
        arguments = shlex.join(added.pip)
        if added.requirements:
            lines.append(f'printf %s {shlex.quote(added.requirements)} >"$work/requirements.txt"')
            arguments += ' --requirement "$work/requirements.txt"'
        lines += [
            f'"$python" -m pip install {arguments}',
            '"$python" -m pip check || echo "WARN packages of the image do not fit together" >&2',
        ]
    if added.script:
        script = added.script if added.script.startswith("#!") else f"#!/bin/sh -e\n{added.script}"
        lines += [
            f'printf %s {shlex.quote(script)} >"$work/script"',
            'chmod +x "$work/script"',
            '"$work/script"',
        ]
    lines += [f"printf '%s\\n' {shlex.quote(json.dumps(record))} >>{RECORD}", 'rm -rf "$work"']
    return "\n".join([*lines, ""])


#: What runs outside: bash -c THIS bash NAME SOURCE PART INSTALL_SCRIPT. The image's entrypoint is
#: left out (--rc); what the container runs comes through stdin, for everybody sees arguments.
OUTSIDE = r"""
set -euo pipefail
name=$1 source=$2 part=$3 install=$4
rc=$(mktemp)
printf 'cd /\nexec "$@"\n' >"$rc"
trap 'rm -f "$rc"; enroot remove --force "$name" >/dev/null 2>&1 || true' EXIT
trap 'exit 130' INT TERM HUP
enroot create --name "$name" "$source"
read_all='all=$(cat); exec </dev/null; eval "$all"'
enroot start --root --rw --rc "$rc" "$name" sh -c "$read_all" <"$install"
enroot export --output "$part" "$name"
"""


def make(
    source: Path,
    target: Path,
    added: Additions,
    *,
    site: Site,
    environ: Mapping[str, str],
    say: Callable[[str], None],
    origin: Mapping[str, Any],
    srun: Sequence[str] = (),
    force: bool = False,
) -> None:
    """Make ``target`` from ``source``; whatever fails, no file is left.

    Args:
        source: a squashfs file.
        target: the file to make.
        added: what is added.
        site: enroot on this machine.
        environ: the environment of enroot.
        say: gets what the user should know.
        origin: what the source is, for the record.
        srun: the command in front, which runs it on a compute node.
        force: replace a file that is there.

    Raises:
        UsageError: Where the target is there already, or its name is not a squashfs file's.
        ImportImageError: Where it fails.
    """
    if target.suffix != ".sqsh":
        raise UsageError(f"--output {target}: pyxis knows an image by its ending, .sqsh.")
    if target.exists() and not force:
        raise UsageError(f"--output {target} exists; --force replaces it.")
    if not target.parent.is_dir():
        raise UsageError(f"--output {target}: there is no directory {target.parent}.")
    problem = squashfs_problem(source)
    if problem:
        raise ImportImageError(f"{source} cannot be used: {problem}.")
    _check_space(source, target, site, elsewhere=bool(srun))
    record = {
        "from": dict(origin),
        "added": added.as_dict(),
        "time": time.strftime("%FT%TZ", time.gmtime()),
    }
    token = secrets.token_hex(8)
    part = target.with_name(f".{target.name}.{token}.part")
    install = target.with_name(f".{target.name}.{token}.install")
    dropped = left_out(environ)
    kept = {name: value for name, value in environ.items() if name not in dropped}
    env = {"ENROOT_SQUASH_OPTIONS": SQUASH_OPTIONS, **kept}
    begun = time.monotonic()
    try:
        with install.open("x", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o600)  # a package index may have a password in its URL
            file.write(install_script(added, record))
        name = f"toolkit-customize-{token}"
        arguments = ["bash", "-c", OUTSIDE, "bash", name, str(source), str(part), str(install)]
        code, said = run_enroot([*srun, *arguments], env, limit_s=LIMIT_S, echo=say)
        if code != 0:
            raise _failure(target, code, said)
        problem = squashfs_problem(part)
        if problem:
            raise ImportImageError(f"{target}: what enroot made is no image: {problem}.")
        part.replace(target)
    except OSError as error:
        raise ImportImageError(f"{target} cannot be written: {error.strerror}.") from error
    finally:
        part.unlink(missing_ok=True)
        install.unlink(missing_ok=True)
    size = target.stat().st_size / 1e6
    say(
        f"made in {time.monotonic() - begun:.0f} s: {target} ({size:.0f} MB);"
        f" {RECORD} in it says how"
    )


def _check_space(source: Path, target: Path, site: Site, *, elsewhere: bool) -> None:
    size = source.stat().st_size
    wanted = [Need(target.parent, "the image", int(size * SQUASHED))]
    if not elsewhere:
        data = site.path("ENROOT_DATA_PATH")
        wanted.append(Need(data, "unpacking (ENROOT_DATA_PATH)", int(size * UNPACKED)))
    check_space(wanted, lambda path: shutil.disk_usage(path).free, lambda path: path.stat().st_dev)


def _failure(target: Path, code: int, said: str) -> ImportImageError:
    lines = [line for line in said.splitlines() if "ERROR" in line or "rror:" in line]
    last = "; ".join(lines[-3:] or said.splitlines()[-3:]) or "it printed nothing"
    hint = ""
    if "No space left" in said:
        hint = " Point ENROOT_DATA_PATH to a larger disk."
    return ImportImageError(f"{target} was not made (exit {code}): {last}.{hint}")
