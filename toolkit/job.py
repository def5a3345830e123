"""What a job is: :class:`JobSpec`, decided once, and :class:`Plan`, what will be executed.

Everything here is data and pure functions. Options keep the names that Slurm and pyxis give them.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from toolkit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from toolkit.config import Setting

DEFAULT_WORKLOAD = "sage"
LAUNCHERS = ("srun", "torchrun")
RENDEZVOUS = ("port", "file")

#: Options that a job takes over as they are.
_AS_GIVEN = (
    "mem",
    "partition",
    "account",
    "qos",
    "constraint",
    "container_image",
    "container_workdir",
    "container_name",
    "container_mount_home",
    "container_writable",
    "array",
    "dependency",
    "hold",
    "signal",
    "requeue",
)

#: A variable whose name says that its value is not to be shown.
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY", re.IGNORECASE)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})")


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """One job, in Slurm's and pyxis's own words.

    ``command`` is the user's; it is empty where ``workload`` names a built-in one. ``time`` is in
    seconds. ``container_build`` is what TOOLKIT_IMAGE_BUILD has to be in the container, where
    that is known. ``env`` holds the variables set by ``--env NAME=VALUE``, ``env_names`` those
    whose value is taken from the environment when the job starts (``--env NAME``). From ``array``
    to ``sbatch_args`` are what only a batch job has.
    """

    command: tuple[str, ...] = ()
    workload: str | None = None
    workload_args: tuple[str, ...] = ()
    job_name: str = "job"
    nodes: int = 1
    ntasks_per_node: int = 1
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None
    mem: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: int | None = None
    constraint: str | None = None
    launcher: str = "srun"
    rendezvous: str = "port"
    container_image: str | None = None
    container_mounts: tuple[str, ...] = ()
    container_workdir: str | None = None
    container_name: str | None = None
    container_mount_home: bool = False
    container_writable: bool = False
    pyxis_flags: tuple[str, ...] = ()  #: those that the cluster's pyxis knows; empty for all
    container_build: str = ""
    env: tuple[tuple[str, str], ...] = ()
    env_names: tuple[str, ...] = ()
    srun_args: tuple[str, ...] = ()
    array: str | None = None
    dependency: str | None = None
    hold: bool = False
    signal: str | None = None
    requeue: bool = True
    sbatch_args: tuple[str, ...] = ()

    @property
    def task_is(self) -> str:
        """What a task of Slurm's is: a ``rank``, or a ``node`` whose torchrun starts the ranks."""
        return "node" if self.launcher == "torchrun" else "rank"

    @property
    def ntasks(self) -> int:
        """The number of ranks on all nodes."""
        return self.nodes * self.ntasks_per_node

    def as_dict(self) -> dict[str, Any]:
        """The job as ``run.json`` keeps it: options that are set, secrets by name only."""
        default = JobSpec()
        shown = {key: value for key, value in vars(self).items() if value != getattr(default, key)}
        shown |= {"nodes": self.nodes, "ntasks_per_node": self.ntasks_per_node}
        if self.env:
            shown["env"] = {name: None if is_secret(name) else value for name, value in self.env}
        return shown


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
            lines.append(shlex.join(process.argv))
        else:
            lines += self._parallel()
        return "\n".join([*lines, ")", ""])

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
    if is_secret(name):
        return f'export {name}="${{{name}:?is a secret, not printed: set it first}}"'
    return f"export {name}={shlex.quote(value)}"


def is_secret(name: str) -> bool:
    """Whether a variable's name says that its value must not be shown."""
    return bool(_SECRET.search(name))


def parse_time(text: str, source: str) -> int:
    """Seconds of a time limit in Slurm's forms: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S.

    Raises:
        UsageError: if the text is none of them, or zero.
    """
    match = _TIME.fullmatch(text)
    if match is None:
        msg = f"{source}: not a time limit. Write minutes, H:M:S or D-H:M:S."
        raise UsageError(msg)
    parts = [int(part) for part in match["parts"].split(":")]
    if match["days"] is not None:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
        total = ((int(match["days"]) * 24 + hours) * 60 + minutes) * 60 + seconds
    elif len(parts) == 3:
        total = (parts[0] * 60 + parts[1]) * 60 + parts[2]
    else:
        minutes, seconds = (*parts, 0)[:2]
        total = minutes * 60 + seconds
    if total == 0:
        msg = f"{source}: no time at all. Give at least one second (0:01)."
        raise UsageError(msg)
    return total


def parse_env(
    items: tuple[str, ...], source: str = "--env"
) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Split ``--env`` values into ``((NAME, VALUE), …)`` and the names without a value.

    Raises:
        UsageError: if a name is not a variable's name.
    """
    values: dict[str, str] = {}
    names: list[str] = []
    for item in items:
        name, equals, value = item.partition("=")
        if not _VARIABLE.fullmatch(name):
            msg = f"{source}: {name!r} is not a variable's name. Write NAME=VALUE or NAME."
            raise UsageError(msg)
        if "\0" in value:
            msg = f"{source}: the value of {name} holds a NUL byte, which no variable can."
            raise UsageError(msg)
        if equals:
            values[name] = value
        elif name not in names:
            names.append(name)
    return tuple(values.items()), tuple(names)


def make_spec(
    settings: Mapping[str, Setting], *, workload: str | None = None, command: tuple[str, ...] = ()
) -> JobSpec:
    """Decide a job from its settings; the tutorials' flags come out in the per-node form.

    ``command`` is the user's command, or the arguments of ``workload``. With neither, the job is
    the default workload.

    Raises:
        UsageError: if a value is out of range or contradicts another.
    """
    if workload is None and not command:
        workload = DEFAULT_WORKLOAD
    values = {key: setting.value for key, setting in settings.items()}
    nodes, ntasks_per_node, gpus_per_node = _layout(settings)
    time = settings.get("time")
    env, env_names = parse_env(tuple(values.get("env", ())))
    return JobSpec(
        command=() if workload else command,
        workload=workload,
        workload_args=command if workload else (),
        job_name=values.get("job_name") or workload or _stem(command),
        nodes=nodes,
        ntasks_per_node=ntasks_per_node,
        gpus_per_node=gpus_per_node,
        cpus_per_task=_count(settings, "cpus_per_task"),
        time=parse_time(time.value, time.source) if time else None,
        launcher=_one_of(settings, "launcher", LAUNCHERS),
        rendezvous=_one_of(settings, "rendezvous", RENDEZVOUS),
        container_mounts=tuple(values.get("container_mounts", ())),
        pyxis_flags=tuple(values.get("pyxis_flags", ())),
        env=env,
        env_names=env_names,
        srun_args=tuple(values.get("srun_arg", ())),
        sbatch_args=tuple(values.get("sbatch_arg", ())),
        **{key: values[key] for key in _AS_GIVEN if key in values},
    )


def _stem(command: tuple[str, ...]) -> str:
    """A job name from a command: the script's name without its ending, else the program's."""
    named = next((word for word in command if word.endswith((".py", ".sh"))), command[0])
    return named.rstrip("/").rpartition("/")[2].removesuffix(".py").removesuffix(".sh") or "job"


def _layout(settings: Mapping[str, Setting]) -> tuple[int, int, int | None]:
    """``(nodes, ntasks_per_node, gpus_per_node)``; --ntasks and --gpus-per-task folded in."""
    nodes = _count(settings, "nodes")
    ntasks = _count(settings, "ntasks")
    per_node = _count(settings, "ntasks_per_node")
    gpus = _count(settings, "gpus_per_node", least=0)
    gpus_per_task = _count(settings, "gpus_per_task", least=0)
    if ntasks is not None:
        source = settings["ntasks"].source
        if nodes is None:
            nodes = ntasks // per_node if per_node and ntasks % per_node == 0 else 1
        if ntasks % nodes:
            msg = (
                f"{source}: cannot be spread evenly over {nodes} nodes, and DDP expects as many"
                " ranks on each. Give --nodes and --ntasks-per-node."
            )
            raise UsageError(msg)
        if per_node is not None and per_node * nodes != ntasks:
            msg = (
                f"{source} contradicts {settings['ntasks_per_node'].source}: {per_node} on each"
                f" of {nodes} nodes are {per_node * nodes}. Leave one out."
            )
            raise UsageError(msg)
        per_node = ntasks // nodes
    if per_node is None:
        per_node = gpus or 1
    if gpus_per_task is not None:
        if gpus is not None and gpus != gpus_per_task * per_node:
            msg = (
                f"{settings['gpus_per_task'].source} contradicts"
                f" {settings['gpus_per_node'].source}: {per_node} ranks on a node need"
                f" {gpus_per_task * per_node}. Leave one out."
            )
            raise UsageError(msg)
        gpus = gpus_per_task * per_node
    return nodes or 1, per_node, gpus


def _count(settings: Mapping[str, Setting], key: str, least: int = 1) -> int | None:
    """A whole number of at least ``least``, or None where it is not set."""
    setting = settings.get(key)
    if setting is None:
        return None
    value: int = setting.value
    if value < least:
        msg = f"{setting.source}: too few; must be {least} or more."
        raise UsageError(msg)
    return value


def _one_of(settings: Mapping[str, Setting], key: str, known: tuple[str, ...]) -> str:
    """One of the known words; the first where it is not set."""
    setting = settings.get(key)
    if setting is None:
        return known[0]
    if setting.value not in known:
        msg = f"{setting.source}: must be {' or '.join(known)}."
        raise UsageError(msg)
    return str(setting.value)
