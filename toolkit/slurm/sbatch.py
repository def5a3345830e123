"""The batch script of a job, and the ``sbatch`` that submits it: pure functions to text and argv.

Resources stand in the script's head and again on its srun line, container flags on the srun line
only (in the head they would put the script itself into the container). The run directory of an
array's element, and whatever else only the running job knows, are shell variables in the script.
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from toolkit import run_dir as run_dirs
from toolkit.entrypoint.finish import SRUN_LOG
from toolkit.errors import UsageError
from toolkit.slurm import environment, srun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from toolkit.job import JobSpec

SCRIPT = "batch.sh"  #: in the run directory
ELEMENT_LOG = "logs/srun-{}.log"  #: what is SRUN_LOG to an array's element, in the array's folder
RUN_AGAIN = 75  #: exit code of a job that wants to run again
MAX_RESTARTS = 50  #: by the script; a job that always ends with 75 must stop one day

#: Sent to the ranks before the time limit, so that they can write a checkpoint. Preemption sends
#: TERM as well; NCCL takes USR1 for itself in some versions. Ranks that do not know the signal die
#: of it, so short jobs, and those whose limit is not known, get none unless asked.
DEFAULT_SIGNAL = "TERM@120"
DEFAULT_SIGNAL_FROM_S = 600

_SIGNAL = re.compile(r"(?:R:)?(?P<name>[A-Z][A-Z0-9]*|\d+)(?:@\d+)?")
_ARRAY_ITEM = re.compile(r"(?P<first>\d+)(?:-(?P<last>\d+)(?::(?P<step>\d+))?)?", re.ASCII)
MAX_ARRAY_INDEX = 4_000_000  # MaxArraySize allows no more: slurm.conf(5)
_PLAIN = re.compile(r"[\w@%+=:,./^~-]+", re.ASCII)
#: Variables with a meaning of bash's own, which an ``export`` cannot set or would change.
# fmt: off
_BASHS_OWN = frozenset({
    "BASHOPTS", "BASHPID", "BASH_ENV", "BASH_VERSINFO", "DIRSTACK", "ENV",
    "EPOCHREALTIME", "EPOCHSECONDS", "EUID", "FUNCNAME", "GROUPS", "IFS", "LINENO",
    "OPTIND", "POSIXLY_CORRECT", "PPID", "RANDOM", "SECONDS", "SHELLOPTS", "SRANDOM",
    "UID", "_",
})
# fmt: on
#: A NUL cannot be part of an argument, so this is how a word holds a shell variable.
_VARIABLE = re.compile("\0([A-Za-z_]+)\0")
_RUN = "\0toolkit_run\0"
_INDEX = "\0SLURM_ARRAY_TASK_ID\0"


def script(
    spec: JobSpec,
    path: Path,
    *,
    cwd: Path,
    environ: Mapping[str, str],
    python: str,
    exists: Callable[[str], bool],
) -> tuple[str, tuple[str, ...]]:
    """The batch script for ``spec`` and notes about it.

    Args:
        spec: the job.
        path: the run directory; an array's elements make a ``PATH_INDEX`` each.
        cwd: where the job starts.
        environ: the caller's environment.
        python: this interpreter, where the nodes see it.
        exists: whether a path is on this machine.

    Raises:
        UsageError: if an option cannot be written into the script's head, or contradicts it.
    """
    if set("%\\\n'") & set(str(path)):
        msg = f"the run directory is {path}: %, \\, ' and line breaks do not get through a batch"
        raise UsageError(f"{msg} script to a log. Choose another folder with --runs DIR.")
    head = _head(spec, path, cwd)
    step = srun.compose(
        spec,
        _RUN,
        kind="batch",
        cwd=cwd,
        environ=environ,
        python=python,
        job_id="\0SLURM_JOB_ID\0",
        fresh="-\0SLURM_JOB_ID\0-\0toolkit_restart\0",
        exists=exists,
    )
    notes = [*step.notes, *srun.contradictions(spec.sbatch_args, head, "--sbatch-arg")]
    if "USR1" in (spec.signal or ""):
        notes.append("--signal USR1: NCCL takes USR1 for itself in some versions; USR2 is safe")
    lines = [
        "#!/usr/bin/env bash",
        *(f"#SBATCH {header_word(flag)}" for flag in head),
        *([f"#SBATCH {' '.join(map(header_word, spec.sbatch_args))}"] if spec.sbatch_args else []),
        f"# toolkit: {spec.nodes} x {spec.ntasks_per_node} ranks",
        "# shellcheck disable=SC2016",  # a dollar sign in the user's words is meant literally
        "set -uo pipefail",
        "",
        *_start(spec, path, cwd),
        "",
        *_environment(spec, step.env, environ),
        "",
        " \\\n\t".join(_lines_of(step.argv)),
        *_end(spec, python),
    ]
    return "\n".join([*lines, ""]), tuple(notes)


def submit_argv(path: Path) -> tuple[str, ...]:
    """The command that submits the script in the run directory ``path`` and prints the job's id."""
    return ("sbatch", "--parsable", str(path / SCRIPT))


def array_indices(text: str) -> list[int]:
    """The task ids of ``--array``: ``0-5``, ``1,3``, ``0-9:3``, each with an optional ``%LIMIT``.

    Raises:
        UsageError: if the text is none of these.
    """
    indices: dict[int, None] = {}
    ids, percent, limit = text.partition("%")
    for item in ids.split(","):
        match = _ARRAY_ITEM.fullmatch(item)
        if match is None or (percent and not limit.isdecimal()):
            msg = f"--array {text}: write task ids such as 0-9, 1,3,5 or 0-9:3, then %LIMIT."
            raise UsageError(msg)
        first, last = int(match["first"]), int(match["last"] or match["first"])
        step = int(match["step"] or 1)
        if step == 0 or not first <= last <= MAX_ARRAY_INDEX:
            msg = f"--array {text}: {item!r} holds no task ids, or more than Slurm can count."
            raise UsageError(msg)
        indices.update(dict.fromkeys(range(first, last + 1, step)))
    return list(indices)


def header_word(word: str) -> str:
    """A word for an ``#SBATCH`` line, where ``#`` starts a comment and white space ends a word.

    Raises:
        UsageError: if it holds a line break, which no quoting gets across.
    """
    if "\n" in word or "\r" in word:
        msg = f"{word!r}: a line break cannot be written into the head of a batch script."
        raise UsageError(msg)
    if _PLAIN.fullmatch(word):
        return word
    name, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{name}{equals}"{escaped}"'


def shell_word(word: str) -> str:
    """A word for the script's body, quoted, with its shell variables left to the shell."""
    pieces = _VARIABLE.split(word)  # literal, name, literal, …
    quoted = [
        # sbatch refuses a script with a carriage return before a line's end.
        f'"${piece}"' if number % 2 else shlex.quote(piece).replace("\r", r"'$'\r''")
        for number, piece in enumerate(pieces)
        if piece
    ]
    return "".join(quoted) or "''"


def _head(spec: JobSpec, path: Path, cwd: Path) -> list[str]:
    """The flags of the script's head."""
    flags = [
        *srun.layout_flags(spec, (*spec.srun_args, *spec.sbatch_args)),
        *srun.job_flags(spec),
        *srun.limit_flags(spec),
        f"--chdir={cwd}",
        f"--output={path / (ELEMENT_LOG.format('%a') if spec.array else SRUN_LOG)}",
        "--open-mode=append",
        "--export=ALL",
        "--requeue" if spec.requeue else "--no-requeue",
    ]
    if signal := signal_of(spec):
        flags.append(f"--signal={signal}")
    wanted = {"array": spec.array, "dependency": spec.dependency}
    flags += [f"--{name}={value}" for name, value in wanted.items() if value]
    return [*flags, "--hold"] if spec.hold else flags


def signal_of(spec: JobSpec) -> str | None:
    """The job's --signal: as given, else the default where the limit is long enough.

    Raises:
        UsageError: if it would not reach the ranks, or is no signal.
    """
    if spec.signal is None:
        return DEFAULT_SIGNAL if (spec.time or 0) >= DEFAULT_SIGNAL_FROM_S else None
    if "B:" in spec.signal:
        msg = f"--signal {spec.signal}: B: signals the batch script alone. Leave B: out, so that it"
        raise UsageError(f"{msg} reaches the ranks.")
    if not _SIGNAL.fullmatch(spec.signal):
        msg = f"--signal {spec.signal}: write SIGNAL@SECONDS, such as USR2@120."
        raise UsageError(msg)
    return spec.signal


def _start(spec: JobSpec, path: Path, cwd: Path) -> list[str]:
    """Where the job runs, and its run directory; an array's element makes its own."""
    lines = [f"toolkit_run={shlex.quote(str(path))}", "toolkit_restart=${SLURM_RESTART_COUNT:-0}"]
    if spec.array:
        parts = [run_dirs.ENTRYPOINT, *(["lib"] if spec.workload else [])]
        sources = " ".join(shlex.quote(str(path / part)) for part in parts)
        element = str(path / ELEMENT_LOG.format(_INDEX))
        lines = [
            f"toolkit_run={shell_word(f'{path}_{_INDEX}')}",
            lines[1],
            'mkdir -p "$toolkit_run"/logs "$toolkit_run"/ranks || exit 78',
            f'cp -R {sources} "$toolkit_run"/ || exit 78',
            # toolkit submit has put it there, with the element's own job id.
            '[ -e "$toolkit_run"/run.json ] ||',
            f'\tcp {shlex.quote(str(path / "run.json"))} "$toolkit_run"/ || exit 78',
            f'ln -sf {shell_word(element)} "$toolkit_run"/{SRUN_LOG}',
        ]
    return [
        *lines,
        # What an attempt left says nothing of the next one: it would be taken for its result.
        'if [ "$toolkit_restart" -gt 0 ]; then',
        '\ttoolkit_before="$toolkit_run"/before-restart-"$toolkit_restart"',
        '\tmkdir -p "$toolkit_before"',
        '\tmv -f "$toolkit_run"/{ranks,result*.json,logs/rank-*} "$toolkit_before" 2>/dev/null',
        f'\tcp "$toolkit_run"/{SRUN_LOG} "$toolkit_before"',
        f'\t: >"$toolkit_run"/{SRUN_LOG}',
        '\tmkdir "$toolkit_run"/ranks',
        "fi",
        f"cd {shlex.quote(str(cwd))} || exit 78  # Slurm goes on in /tmp where it is missing",
        'echo "toolkit: job $SLURM_JOB_ID, restart $toolkit_restart, on $SLURM_JOB_NODELIST"',
        "trap : TERM  # the ranks get it too; this script outlives them and records how they ended",
    ]


def _environment(spec: JobSpec, env: Mapping[str, str], environ: Mapping[str, str]) -> list[str]:
    """What is unset and set before srun."""
    asked = environment.asked_for(spec)
    shells = sorted(_BASHS_OWN & asked)
    if shells:
        msg = f"--env {shells[0]}: bash has a use of its own for {shells[0]}. Take another name."
        raise UsageError(msg)
    inherited = [name for name in _SAID_AGAIN if name not in asked]
    lines = [f"unset {' '.join(inherited)}  # said again below"]
    if names := environment.login_node(spec):
        words: list[str] = []
        for name in names:
            if not name.endswith("_"):
                words.append(name)
            elif any(other.startswith(name) for other in spec.env_names):
                words += sorted(n for n in environ if n.startswith(name) and n not in asked)
            else:
                words.append(f'"${{!{name}@}}"')
        lines.append(f"unset {' '.join(words)}  # the login node's, not the image's")
    passed = [name for name in (*spec.env_names, *env) if name not in env or _passed(name)]
    if passed:
        lines.append(f"# from the environment of sbatch: {' '.join(passed)}")
    lines += [f"export {name}={shell_word(env[name])}" for name in env if not _passed(name)]
    return lines


#: Set by sbatch from the script's head and read by srun, by one release or the other.
_SAID_AGAIN = (
    "SLURM_CPUS_PER_TASK",
    "SLURM_TRES_PER_TASK",
    "SLURM_GPUS_PER_TASK",
    "SLURM_TRES_BIND",
    "SLURM_GPU_BIND",
)


def _passed(name: str) -> bool:
    return environment.through_sbatch(name)


def _lines_of(argv: Iterable[str]) -> list[str]:
    """The words of the srun line, each on its own line; the command together on the last."""
    words = list(argv)
    command = next(number for number, word in enumerate(words) if number and word[:1] != "-")
    quoted = [shell_word(word) for word in words]
    return [" ".join(quoted[:2]), *quoted[2:command], " ".join(quoted[command:])]


def _end(spec: JobSpec, python: str) -> list[str]:
    """Record how the job ended, run it again where it wants to, and exit with its code.

    The first Python that can is asked how it ended: some hosts have nothing newer than 3.6.
    """
    able = "import sys; sys.exit(sys.version_info < (3, 8))"
    entry = f'"$toolkit_python" -I -S "$toolkit_run"/{run_dirs.ENTRYPOINT}'
    lines = [
        "toolkit_code=$?",
        "",
        f"for toolkit_python in {shlex.quote(python)} python3; do",
        f"""\tif "$toolkit_python" -I -S -c '{able}' 2>/dev/null; then""",
        f'\t\t{entry} --finish "$toolkit_run" "$toolkit_code"',
        "\t\ttoolkit_code=$?",
        "\t\tbreak",
        "\tfi",
        "done",
    ]
    if spec.requeue:
        again = f'[ "$toolkit_code" -eq {RUN_AGAIN} ] && [ "$toolkit_restart" -lt {MAX_RESTARTS} ]'
        lines += [
            f"if {again}; then",
            '\tmv "$toolkit_run"/result.json "$toolkit_run"/result-"$toolkit_restart".json',
            '\tscontrol requeue "$SLURM_JOB_ID"',
            "fi",
        ]
    return [*lines, 'exit "$toolkit_code"']
