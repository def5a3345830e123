"""What will be executed, as data, and how it ended."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from toolkit.common.secrets import is_secret

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@dataclass(frozen=True)
class Process:
    """One process that the plan starts: a rank on this machine, or one ``srun``."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    label: str = ""
    log: str | None = None  #: relative to the run directory


@dataclass(frozen=True)
class Plan:
    """What will be executed, as data: ``toolkit run`` does it, ``--dry-run`` prints it.

    ``stage`` is the command that makes the run directory, ``files`` the texts that are written into
    it, by name; ``unset`` and ``env`` describe the environment of every process, relative to the
    caller's own. ``before`` is run one by one before the processes are started, ``after`` however
    they end.
    """

    title: str
    run_dir: Path
    cwd: Path
    stage: tuple[str, ...]
    processes: tuple[Process, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    before: tuple[tuple[str, ...], ...] = ()
    after: tuple[tuple[str, ...], ...] = ()

    def environment(self, process: Process, environ: Mapping[str, str]) -> dict[str, str]:
        """The whole environment of ``process``, made from the caller's ``environ``."""
        kept = {name: value for name, value in environ.items() if name not in self.unset}
        return {**kept, **self.env, **process.env}

    def script(self) -> str:
        """The plan as a bash script that can be pasted into a shell."""
        lines = [
            "#!/usr/bin/env bash",
            # A dollar sign in the user's words is meant literally; a trap calls finish().
            "# shellcheck disable=SC2016,SC2317",
            f"# {self.title}",
            *(f"# {note}" for note in self.notes),
        ]
        lines += [
            "(",
            "set -euo pipefail",
            f"cd {shlex.quote(str(self.cwd))}",
            shlex.join(self.stage),
        ]
        for name, text in self.files.items():
            path = shlex.quote(str(self.run_dir / name))
            lines.append(f"printf %s {shlex.quote(text)} >{path}")
        if self.unset:
            lines.append(f"unset {' '.join(self.unset)}")
        lines += [_export(name, value) for name, value in self.env.items()]
        if len(self.processes) == 1 and not self.after:
            (process,) = self.processes
            lines += [_export(name, value) for name, value in process.env.items()]
            # What the record names is then the process that can be cancelled.
            lines += ["exec \\", shlex.join(process.argv)]
        else:
            lines += self._parallel()
        return "\n".join([*lines, ")", ""])

    def commands(self) -> str:
        """The plan of one process, without a run directory, as lines to paste."""
        (process,) = self.processes
        unset = [f"unset {name}" for name in self.unset]
        exported = [_export(name, value) for name, value in self.env.items()]
        return "\n".join([*unset, *exported, shlex.join(process.argv), ""])

    def _parallel(self) -> list[str]:
        """Start every process in a session of its own; end the rest as soon as one fails.

        Each says by a pipe how it ended: ``wait -n`` forgets all but one of those that end at once.
        """
        lines = []
        for process in self.processes:
            variables = [f"{name}={shlex.quote(value)}" for name, value in process.env.items()]
            log = str(self.run_dir / process.log) if process.log else "/dev/null"
            words = shlex.join([process.label, log, *process.argv])
            lines.append(f'{" ".join(variables)} setsid bash -c "$rank" {words} &')
        return [
            "stop() {",
            "  mapfile -t left < <(jobs -p)",
            '  [ ${#left[@]} -eq 0 ] || kill "-$1" -- "${left[@]/#/-}" 2>/dev/null || true',
            "}",
            "finish() {",
            "  stop KILL",
            *(f"  {shlex.join(command)} >/dev/null || true" for command in self.after),
            "}",
            "trap finish EXIT",
            "ends=$(mktemp -u)",
            'mkfifo "$ends"',
            'exec 3<>"$ends"',
            'rm "$ends"',
            *(f"{shlex.join(command)} >/dev/null" for command in self.before),
            f"rank={shlex.quote(_RANK)}",
            *lines,
            f"for _ in $(seq {len(self.processes)}); do",
            "  read -r status <&3",
            '  [ "$status" -eq 0 ] || break',
            "done",
            'if [ "$status" -ne 0 ]; then stop TERM; sleep 2; fi',
            'exit "$status"',
        ]


#: What a printed plan runs for each process: ``bash -c … LABEL LOG ARGV…``.
_RANK = """\
label=$0 log=$1
shift
"$@" 2>&1 </dev/null 3>&- | tee "$log" | sed -u "s/^/[$label] /"
echo "${PIPESTATUS[0]}" >&3"""


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Times are seconds since the epoch; ``hosts`` has one name a node; ``failure`` is that of
    :func:`toolkit.entrypoint.finish.failure`.
    """

    exit_code: int
    started: float
    ended: float
    hosts: tuple[str, ...]
    failure: dict[str, Any] | None = None


def _export(name: str, value: str) -> str:
    if is_secret(name, value):
        return f'export {name}="${{{name}:?is a secret, not printed: set it first}}"'
    return f"export {name}={shlex.quote(value)}"
