"""How a run ended: read srun's messages, name the first failing rank, write ``result.json``.

A batch script calls this as ``entrypoint.pyz --finish RUN_DIR CODE`` on a compute node, so it is
standard library only and Python 3.8 clean; ``toolkit run``, ``status`` and ``logs`` use the same
functions. What srun prints was measured with 22.05.8 and 24.11.5.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time

from toolkit.entrypoint import causes, codes, run_files
from toolkit.entrypoint.run_files import write_whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

    Json = Dict[str, Any]

LAST_LINES = 10
RAN_OUT_OF_MEMORY = "ran out of memory"

_TASK = re.compile(r"error: (?P<host>\S+): tasks? (?P<ranks>[\d,-]+): (?P<how>.+)")
_EXITED = re.compile(r"Exited with exit code (\d+)")
_ENDED = re.compile(
    r"\*\*\* (?:JOB|STEP) (?P<job>\d+).* CANCELLED AT \S+(?: DUE TO (?P<why>[^*]+))?"
)
# Not a bare "STEP … CANCELLED": that is also how the other ranks of a failed one are ended.
_ENDED_BY_SLURM = re.compile(r"\*\*\* JOB \d+.* CANCELLED AT|CANCELLED AT \S+ DUE TO ")
_OOM = re.compile(r"[Oo]ut [Oo]f [Mm]emory|oom[-_]kill|OOM Killed|xceeded (?:job )?memory limit")
_CANCELLED_IN_QUEUE = "srun: Job has been cancelled"
_NODE = re.compile(r"[Nn]ode failure on (\S+)")
_CONTAINER = re.compile(r"pyxis: |spank_pyxis|execve\(\): |couldn't chdir to")
_BOILERPLATE = re.compile(  # stands around the line that says why
    r"printing enroot log|by another task|required plugin|exited too soon|failed with error code"
)
_LABEL = re.compile(r"(\d+): ?")  # by srun --label, with zeros in front
_SRUN = re.compile(r"(?:srun|sbatch): (?:error|fatal): (.+)")

#: What strsignal(3) calls the signals that end a task.
_SIGNALS = {
    "Aborted": 6, "Bus error": 7, "Floating point exception": 8, "Hangup": 1, "Quit": 3,
    "Illegal instruction": 4, "Interrupt": 2, "Killed": 9, "Segmentation fault": 11,
    "Terminated": 15, "Trace/breakpoint trap": 5, "User defined signal 1": 10,
    "User defined signal 2": 12,
}  # fmt: skip


def first_failure(lines: Sequence[str], started: Callable[[int], bool]) -> Optional[Json]:
    """The first thing that went wrong, by the order of srun's messages; None where nothing did.

    srun's own status cannot tell: with ``--kill-on-bad-exit`` it is that of the ranks it killed.

    Args:
        lines: what srun and slurmstepd printed on stderr.
        started: whether a rank's command was started, that is, whether its record is there.

    Returns:
        The ``failure`` of ``result.json``, without the last lines.
    """
    out_of_memory = any(_OOM.search(line) for line in lines)
    # In a batch job the lines come from several files, so their order says nothing there; but a
    # rank that died of a signal, in a job that Slurm says it ended, died of that.
    ended = [line for line in lines if _ENDED_BY_SLURM.search(line)]
    for line in lines:
        found = first_event(line, out_of_memory=out_of_memory)
        if found is None:
            continue
        rank = found["rank"]
        if ended and rank is not None and "by signal" in found["reason"]:
            return _slurm_failure(ended[0])
        if rank is not None and not started(rank):
            found["origin"] = "toolkit"  # the entrypoint itself gave up, and says why in the log
            why = _container_message(lines)
            if why:
                found.update(
                    origin="slurm", reason="did not start: " + why, exit_code=codes.UNAVAILABLE
                )
        return found
    for line in lines:
        refused = _SRUN.search(line)
        if refused is not None:
            return failure(
                "slurm", "was refused by Slurm: " + refused.group(1).rstrip("."), codes.UNAVAILABLE
            )
    return None


def first_event(line: str, *, out_of_memory: bool = False) -> Optional[Json]:
    """What one message says has gone wrong: a task failed, or Slurm ended the job or step."""
    return _task_failure(line, out_of_memory=out_of_memory) or _slurm_failure(line)


def _task_failure(line: str, *, out_of_memory: bool) -> Optional[Json]:
    """A task that srun reports as failed, with its own exit code."""
    match = _TASK.search(line)
    if match is None:
        return None
    how = match.group("how").replace("(core dumped)", "").strip()
    exited = _EXITED.match(how)
    rank = int(re.split("[,-]", match.group("ranks"))[0])
    if _OOM.search(how) or (out_of_memory and how == "Killed"):
        return failure(
            "workload", RAN_OUT_OF_MEMORY, codes.OUT_OF_MEMORY, rank, match.group("host")
        )
    if exited is not None:
        code = int(exited.group(1))
    elif how in _SIGNALS:
        code = codes.SIGNAL + _SIGNALS[how]
    else:
        return None
    return failure("workload", exit_reason(code), code, rank, match.group("host"))


def _slurm_failure(line: str) -> Optional[Json]:
    """A job or step that Slurm ended: time limit, preemption, lost node, cancellation."""
    node = _NODE.search(line)
    if node is not None:
        return failure(
            "slurm", "lost node " + node.group(1).rstrip("."), codes.OF_STATE["NODE_FAIL"]
        )
    if _CANCELLED_IN_QUEUE in line:
        return failure("slurm", "was cancelled in the queue", codes.CANCELLED)
    ended = _ENDED.search(line)
    if ended is None:
        return None
    why = (ended.group("why") or "").strip()
    if not why:
        return failure("slurm", "was cancelled", codes.CANCELLED)
    state = codes.STATE_OF_REASON.get(why, "PREEMPTED")
    return failure("slurm", "was ended: " + why.lower(), codes.OF_STATE[state])


def _container_message(lines: Sequence[str]) -> str:
    """What kept a container or command from starting, once each, without srun's prefixes."""
    found = [line.strip() for line in lines if _CONTAINER.search(line)]
    telling = [line for line in found if not _BOILERPLATE.search(line)] or found
    texts = (re.sub(r"^.*?error: (?:pyxis: +)?(?:\[ERROR\] )?", "", line) for line in telling)
    return "; ".join(dict.fromkeys(texts))


def failure(
    origin: str, reason: str, code: int, rank: Optional[int] = None, host: Optional[str] = None
) -> Json:
    """The ``failure`` of a ``result.json``: ``origin`` is workload, toolkit or slurm.

    ``hint`` is what to do about it, where that is known.
    """
    return {
        "origin": origin,
        "reason": reason,
        "rank": rank,
        "host": host,
        "exit_code": code,
        "last_lines": [],
        "hint": None,
    }


def state_of(failed: Optional[Json]) -> str:
    """Slurm's word for how a run ended, in lower case.

    A rank's own exit code is its own: one that exits with 124 has failed.
    """
    if failed is None:
        return "completed"
    if failed["origin"] == "workload":
        memory = failed["reason"] == RAN_OUT_OF_MEMORY
        return "out_of_memory" if memory else "failed"
    if "node" in failed["reason"] and failed["exit_code"] == codes.RUN_AGAIN:
        return "node_fail"
    return codes.STATE_OF_CODE.get(failed["exit_code"], "FAILED").lower()


def describe(failed: Json) -> str:
    """A failure as one paragraph, with the rank's last lines below it."""
    where = "the run" if failed["rank"] is None else "rank %d" % failed["rank"]
    on = " on " + failed["host"] if failed["host"] else ""
    text = "%s%s %s." % (where, on, failed["reason"])
    if failed["last_lines"]:
        text += " Its last lines:" + "".join("\n  | " + line for line in failed["last_lines"])
    if failed.get("hint"):
        text += ("\n" if failed["last_lines"] else " ") + failed["hint"]
    return text


def exit_reason(code: int) -> str:
    """What an exit code of a process says; 128+n stands for signal n, as in a shell."""
    try:
        number = code - codes.SIGNAL
        return "was ended by signal %d (%s)" % (number, signal.Signals(number).name)
    except ValueError:
        return "exited with code %d" % code


def result(
    run_dir: str,
    code: int,
    failed: Optional[Json],
    *,
    started: Optional[float],
    ended: float,
    hosts: Sequence[str],
) -> Json:
    """The ``result.json`` of a run: the failure gets its last lines, the metrics are merged.

    Args:
        run_dir: the run directory, whose ``run.json`` says what was to run.
        code: the exit code of the run.
        failed: what went wrong, from :func:`failure` or :func:`first_failure`.
        started: seconds since the epoch.
        ended: seconds since the epoch.
        hosts: one name a node.
    """
    record = read_json(os.path.join(run_dir, run_files.RECORD)) or {}
    if failed is not None:
        code = explain(run_dir, failed)
    return {
        "run_dir": run_dir,
        "exit_code": code,
        "state": state_of(failed),
        "target": record.get("target"),
        "world_size": record.get("world_size"),
        "num_nodes": record.get("num_nodes"),
        "hosts": list(hosts),
        "started": started,
        "ended": ended,
        "failure": failed,
        "metrics": metrics(run_dir),
    }


def explain(run_dir: str, failed: Json) -> int:
    """Add a rank's last lines to its failure, and what to do about it; return the exit code."""
    record = read_json(os.path.join(run_dir, run_files.RECORD)) or {}
    if failed["rank"] is not None and not failed["last_lines"]:
        failed["last_lines"] = last_printed(run_dir, failed["rank"], task_is(record))
    if failed["hint"] is None:
        failed["hint"] = causes.advice([failed["reason"], *failed["last_lines"]])
        if failed["reason"] == RAN_OUT_OF_MEMORY:
            failed["hint"] = causes.OUT_OF_MEMORY
    if failed["origin"] == "workload" and causes.is_full(run_dir):
        failed["reason"] += "; the file system of %s is full" % run_dir
        failed["exit_code"] = codes.UNAVAILABLE
        failed["hint"] = "Make room there, or keep runs elsewhere (--runs DIR)."
    return int(failed["exit_code"])


def finish(run_dir: str, code: int, again: str = "") -> int:
    """Write ``result.json`` at the end of a batch script; return the first failing rank's code.

    Args:
        run_dir: the run directory.
        code: what srun ended with.
        again: the name for the result of a job that will be run again, since it is none of the run.

    Raises:
        OSError: it cannot be written.
    """
    failed = judge(run_dir, code)
    records = rank_records(run_dir)
    ended = result(
        run_dir,
        0,
        failed,
        started=min((record["started"] for record in records), default=None),
        ended=time.time(),
        hosts=hosts(records),
    )
    name = again if again and ended["exit_code"] == codes.RUN_AGAIN else run_files.RESULT
    write_json(os.path.join(run_dir, name), ended)
    return int(ended["exit_code"])


def judge(run_dir: str, code: int) -> Optional[Json]:
    """Why srun ended with ``code``, from what it left in the run directory; None for success.

    Slurm's own word and a user's count even where srun ended with 0, as it does when ranks that
    were told to end outlive the grace: what was cancelled is not completed.
    """
    by = read_json(os.path.join(run_dir, run_files.CANCELLED))
    if by is not None:
        return cancelled(by)
    said = messages(run_dir)
    if code == 0:
        ended = [line for line in said if _ENDED.search(line)]
        return _slurm_failure(ended[0]) if ended else None
    found = first_failure(
        said,
        lambda rank: os.path.exists(os.path.join(run_dir, run_files.rank_record(rank))),
    )
    if found is not None:
        record = read_json(os.path.join(run_dir, run_files.RECORD)) or {}
        if found["rank"] is not None and signalled_before_limit(run_dir, record, found):
            return failure(
                "slurm", "reached its time limit, of which its ranks were warned", codes.TIME_LIMIT
            )
        if task_is(record) == run_files.NODE and found["rank"] is not None:
            return torchrun_failure(run_dir, found)
        return _explained(run_dir, found)
    by_signal = codes.SIGNAL < code <= codes.SIGNAL + 64
    return failure("slurm", exit_reason(code), code if by_signal else codes.UNAVAILABLE)


def signalled_before_limit(run_dir: str, record: Json, found: Json) -> bool:
    """Whether a rank died of the signal that Slurm sends some time before the limit (--signal).

    Slurm may send it up to 60 s early: sbatch(1), ``--signal``.
    """
    job = record.get("job", {})
    lead = re.search(r"@(\d+)$", job.get("signal") or "")
    if not (job.get("time") and lead and "by signal" in found["reason"]):
        return False
    begun = min((one["started"] for one in rank_records(run_dir)), default=None)
    return bool(begun and time.time() - begun > job["time"] - int(lead.group(1)) - 60)


def torchrun_failure(run_dir: str, found: Json) -> Json:
    """The rank that a node's torchrun reports as the root cause; torchrun itself ends with 1."""
    lines = read_lines(os.path.join(run_dir, run_files.log(found["rank"], run_files.NODE)))
    report = "\n".join(lines).rpartition("Root Cause (first observed failure):")[2]
    cause = dict(re.findall(r"^ +(host|rank|exitcode) +: (\S+)", report, re.MULTILINE))
    if not re.fullmatch(r"-?\d+", cause.get("exitcode", "")) or not cause.get("rank"):
        return dict(found, rank=None, last_lines=lines[-LAST_LINES:])
    code = codes.of_signal(int(cause["exitcode"]))
    shown = failure("workload", exit_reason(code), code, int(cause["rank"]), cause.get("host"))
    before = [line for line in lines if "torch/distributed/elastic" in line]
    shown["last_lines"] = lines[: lines.index(before[0])][-LAST_LINES:] if before else []
    return shown


def cancelled(by: Json) -> Json:
    """The failure of a run that somebody cancelled, as its mark says."""
    who = "by %s on %s" % (by.get("user"), by.get("host"))
    return failure("toolkit", "was cancelled " + who, codes.CANCELLED)


def _explained(run_dir: str, found: Json) -> Json:
    """Say in our words what Python says where a node does not see the run directory."""
    if found["origin"] == "toolkit" and any(
        "can't open file" in line for line in last_printed(run_dir, found["rank"], run_files.RANK)
    ):
        reason = "does not see %s, which must be on storage that all nodes share" % run_dir
        found.update(reason=reason, exit_code=codes.UNAVAILABLE)
    return found


def messages(run_dir: str) -> List[str]:
    """What srun and slurmstepd said: how a step ended."""
    lines = read_lines(os.path.join(run_dir, run_files.SRUN_LOG))
    split = [split_label(line) for line in lines]
    return [text for task, text in split if task is None]


def job_id(run_dir: str) -> Optional[str]:
    """The job that Slurm ended, as its own message names it; None where there is none."""
    for line in messages(run_dir):
        ended = _ENDED.search(line)
        if ended is not None:
            return ended.group("job")
    return None


def step_id(run_dir: str) -> Optional[str]:
    """``JOB.STEP`` of the ranks, as one of them recorded it; None where none has."""
    for record in rank_records(run_dir):
        if record.get("job_id") and record.get("step_id"):
            return "%s.%s" % (record["job_id"], record["step_id"])
    return None


def metrics(run_dir: str) -> Json:
    """The last value of every key that the workload reported."""
    merged: Json = {}
    for line in read_lines(os.path.join(run_dir, run_files.METRICS)):
        merged.update(parse_metrics(line))
    return merged


def parse_metrics(line: str) -> Json:
    """One line of ``metrics.jsonl``; empty for a line that is no JSON object (or half of one)."""
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def rank_records(run_dir: str) -> List[Json]:
    """What the entrypoint left of each rank, in the order of ranks."""
    folder = os.path.join(run_dir, run_files.RANKS)
    try:
        names = [name for name in os.listdir(folder) if name.endswith(".json")]
    except FileNotFoundError:  # an attempt is being moved aside
        names = []
    found = [read_json(os.path.join(folder, name)) for name in names]
    return sorted((record for record in found if record), key=lambda record: record["rank"])


def hosts(records: Sequence[Json]) -> List[str]:
    """The hosts that ranks ran on, one a node, from what :func:`rank_records` found."""
    return [record["host"] for record in records if record["local_rank"] == 0]


def task_is(record: Json) -> str:
    """What one task of Slurm's is: a ``rank``, or a ``node`` whose torchrun starts the ranks."""
    torchrun = record.get("job", {}).get("launcher") == "torchrun"
    return run_files.NODE if torchrun else run_files.RANK


def last_printed(run_dir: str, number: int, task: str) -> List[str]:
    """The last lines of a task: from its log, or what srun passed on of one that had none yet."""
    found = last_lines(os.path.join(run_dir, run_files.log(number, task)))
    if not found:
        said = last_lines(os.path.join(run_dir, run_files.SRUN_LOG), 200)
        split = [split_label(line) for line in said]
        found = [text for label, text in split if label == number][-LAST_LINES:]
    return found


def split_label(line: str) -> Tuple[Optional[int], str]:
    """The task that srun passed a line on for, None for none, and the line.

    slurmstepd speaks through a task's stream and with its label, but is no task.
    """
    match = _LABEL.match(line)
    if match is None:
        return None, line
    text = line[match.end() :]
    return (None if text.startswith("slurmstepd") else int(match.group(1))), text


def last_lines(path: str, count: int = LAST_LINES) -> List[str]:
    """The end of a log; empty where there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 64 * 1024))
            return file.read().decode(errors="replace").splitlines()[-count:]
    except FileNotFoundError:
        return []


def read_lines(path: str) -> List[str]:
    """A file's lines; empty where there is none."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().splitlines()
    except FileNotFoundError:
        return []


def read_json(path: str) -> Optional[Json]:
    """A JSON object from a file; None where there is none."""
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except (FileNotFoundError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def write_json(path: str, value: Json) -> None:
    """Write a JSON file, whole or not at all."""
    write_whole(path, json.dumps(value, indent=2) + "\n")
