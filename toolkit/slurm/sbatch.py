"""The batch script of a job, and the ``sbatch`` that submits it: pure functions to text and argv.

Resources stand in the script's head and again on its srun line, container flags on the srun line
only (in the head they would put the script itself into the container). The run directory of an
array's element, and whatever else only the running job knows, are shell variables in the script.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.common.environment import LOGIN_NODE
from toolkit.entrypoint import codes, run_files
from toolkit.errors import UsageError
from toolkit.options import Said, said
from toolkit.slurm import environment, srun

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from toolkit.job import Job
    from toolkit.options import JobSpec

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
_VARIABLE = re.compile("\0([A-Za-z_]+)\0")
_RUN = "\0toolkit_run\0"
_INDEX = "\0SLURM_ARRAY_TASK_ID\0"


def script(job: Job) -> tuple[str, tuple[str, ...]]:
    """The batch script of a job, and notes about it; an array's elements make a ``RUN_INDEX`` each.

    Raises:
        UsageError: if an option cannot be written into the script's head, or contradicts it.
    """
    spec, path = job.spec, job.run_dir
    if set("%\\\n'") & set(str(path)):
        msg = f"the run directory is {path}: %, \\, ' and line breaks do not get through a batch"
        raise UsageError(f"{msg} script to a log. Choose another folder with --runs DIR.")
    head = _head(job)
    step = srun.compose(job.at(Path(_RUN), f"-{srun.JOB_ID}-\0toolkit_restart\0"))
    notes = [*step.notes, *srun.contradictions(spec.sbatch_arg, head, "--sbatch-arg")]
    if "USR1" in (spec.signal or ""):
        notes.append("--signal USR1: NCCL takes USR1 for itself in some versions; USR2 is safe")
    lines = [
        "#!/usr/bin/env bash",
        *(f"#SBATCH {header_word(flag)}" for flag in head),
        *([f"#SBATCH {' '.join(map(header_word, spec.sbatch_arg))}"] if spec.sbatch_arg else []),
        f"# toolkit: {spec.nodes} x {spec.ntasks_per_node} ranks",
        "# shellcheck disable=SC2016",  # a dollar sign in the user's words is meant literally
        "set -uo pipefail",
        "",
        *_start(job),
        "",
        *_environment(job, step.env),
        "",
        " \\\n\t".join(_lines_of(step.argv)),
        *_end(job),
    ]
    return "\n".join([*lines, ""]), tuple(notes)


def submit_argv(path: Path) -> tuple[str, ...]:
    """The command that submits the script in the run directory ``path`` and prints the job's id."""
    return ("sbatch", "--parsable", str(path / run_files.BATCH_SCRIPT))


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


def _head(job: Job) -> list[str]:
    """The flags of the script's head."""
    log = run_files.ELEMENT_LOG.format("%a") if job.spec.array else run_files.SRUN_LOG
    return [
        *srun.layout_flags(job.spec),
        *said(job.spec, Said.JOB, Said.LIMIT),
        f"--chdir={job.cwd}",
        f"--output={job.run_dir / log}",
        "--open-mode=append",
        "--export=ALL",
        *said(job.spec, Said.HEAD),
    ]


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


def _start(job: Job) -> list[str]:
    """Where the job runs, and its run directory; an array's element makes its own."""
    path, files, lacks = job.run_dir, run_files, codes.UNAVAILABLE
    lines = [f"toolkit_run={shlex.quote(str(path))}", "toolkit_restart=${SLURM_RESTART_COUNT:-0}"]
    if job.spec.array:
        parts = [files.ENTRYPOINT, *([files.LIB] if job.workload else [])]
        sources = " ".join(shlex.quote(str(path / part)) for part in parts)
        element = str(path / files.ELEMENT_LOG.format(_INDEX))
        lines = [
            f"toolkit_run={shell_word(f'{path}_{_INDEX}')}",
            lines[1],
            f'mkdir -p "$toolkit_run"/{files.LOGS} "$toolkit_run"/{files.RANKS} || exit {lacks}',
            f'cp -R {sources} "$toolkit_run"/ || exit {lacks}',
            # toolkit submit has put it there, with the element's own job id.
            f'[ -e "$toolkit_run"/{files.RECORD} ] ||',
            f'\tcp {shlex.quote(str(path / files.RECORD))} "$toolkit_run"/ || exit {lacks}',
            f'ln -sf {shell_word(element)} "$toolkit_run"/{files.SRUN_LOG}',
        ]
    left = f"{files.RANKS},{_result('*')},{files.log('*', job.spec.task)}"
    there = f"cd {shlex.quote(str(job.cwd))} || exit {lacks}"
    return [
        *lines,
        # What an attempt left says nothing of the next one: it would be taken for its result.
        'if [ "$toolkit_restart" -gt 0 ]; then',
        f'\ttoolkit_before="$toolkit_run"/{files.BEFORE_RESTART}"$toolkit_restart"',
        '\tmkdir -p "$toolkit_before.part"',
        f'\tmv -f "$toolkit_run"/{{{left}}} "$toolkit_before.part" 2>/dev/null',
        f'\tcp "$toolkit_run"/{files.SRUN_LOG} "$toolkit_before.part"',
        # Who follows the logs finds all of them under the new name, or none.
        '\tmv "$toolkit_before.part" "$toolkit_before"',
        f'\t: >"$toolkit_run"/{files.SRUN_LOG}',
        f'\tmkdir "$toolkit_run"/{files.RANKS}',
        "fi",
        f"{there}  # Slurm goes on in /tmp where it is missing",
        'echo "toolkit: job $SLURM_JOB_ID, restart $toolkit_restart, on $SLURM_JOB_NODELIST"',
        "trap : TERM  # the ranks get it too; this script outlives them and records how they ended",
    ]


def _environment(job: Job, env: Mapping[str, str]) -> list[str]:
    """What is unset and set before srun."""
    asked = set(dict(job.spec.env))
    shells = sorted(_BASHS_OWN & asked)
    if shells:
        msg = f"--env {shells[0]}: bash has a use of its own for {shells[0]}. Take another name."
        raise UsageError(msg)
    inherited = [name for name in _SAID_AGAIN if name not in asked]
    lines = [f"unset {' '.join(inherited)}  # said again below"]
    if job.container:
        words: list[str] = []
        for name in LOGIN_NODE:
            if not name.endswith("_"):
                words += [name] if name not in asked else []
            elif any(other.startswith(name) for other in asked):
                words += sorted(n for n in job.left_out if n.startswith(name))
            else:
                words.append(f'"${{!{name}@}}"')
        lines.append(f"unset {' '.join(words)}  # the login node's, not the image's")
    written = {
        name: value for name, value in env.items() if not environment.through_sbatch(name, value)
    }
    if passed := [name for name in (*job.spec.env_names, *env) if name not in written]:
        lines.append(f"# from the environment of sbatch: {' '.join(passed)}")
    return [*lines, *(f"export {name}={shell_word(value)}" for name, value in written.items())]


#: Set by sbatch from the script's head and read by srun, by one release or the other.
_SAID_AGAIN = (
    "SLURM_CPUS_PER_TASK",
    "SLURM_TRES_PER_TASK",
    "SLURM_GPUS_PER_TASK",
    "SLURM_TRES_BIND",
    "SLURM_GPU_BIND",
)


def _lines_of(argv: Iterable[str]) -> list[str]:
    """The words of the srun line, each on its own line; the command together on the last."""
    words = list(argv)
    command = next(number for number, word in enumerate(words) if number and word[:1] != "-")
    quoted = [shell_word(word) for word in words]
    return [" ".join(quoted[:2]), *quoted[2:command], " ".join(quoted[command:])]


def _end(job: Job) -> list[str]:
    """Record how the job ended, run it again where it wants to, and exit with its code.

    The first Python that can is asked how it ended: some hosts have nothing newer than 3.6.
    """
    able = "import sys; sys.exit(sys.version_info < (3, 8))"
    entry = f'"$toolkit_python" -I -S "$toolkit_run"/{run_files.ENTRYPOINT}'
    again = _result('-"$toolkit_restart"')
    lines = ["toolkit_code=$?", ""]
    given = ""
    if job.spec.requeue:
        # The result of an attempt that is followed by another is none of the run.
        given = ' ${toolkit_again:+"$toolkit_again"}'
        lines += [
            "toolkit_again=",
            f'[ "$toolkit_restart" -ge {MAX_RESTARTS} ] || toolkit_again={again}',
        ]
    lines += [
        f"for toolkit_python in {shlex.quote(job.host_python)} python3; do",
        f"""\tif "$toolkit_python" -I -S -c '{able}' 2>/dev/null; then""",
        f'\t\t{entry} --finish "$toolkit_run" "$toolkit_code"{given}',
        "\t\ttoolkit_code=$?",
        "\t\tbreak",
        "\tfi",
        "done",
    ]
    if job.spec.requeue:
        wants = f'[ "$toolkit_code" -eq {codes.RUN_AGAIN} ]'
        lines += [
            f'if {wants} && [ -n "$toolkit_again" ]; then',
            '\tscontrol requeue "$SLURM_JOB_ID" ||',
            f'\t\tmv "$toolkit_run"/"$toolkit_again" "$toolkit_run"/{run_files.RESULT}',
            "fi",
        ]
    return [*lines, 'exit "$toolkit_code"']


def _result(mark: str) -> str:
    """The name of results that were set aside: ``result-1.json``."""
    return run_files.RESULT.replace(".", f"{mark}.")
