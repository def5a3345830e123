"""The run directory: one folder a run, on storage that all nodes see.

::

    runs/NAME-TIME/
        run.json         what runs where: the job, the target, the code's revision
        script.sh        what was executed, as --dry-run prints it
        entrypoint.pyz   the entrypoint, for any Python 3.8 or newer in any image
        lib/             the built-in workloads' code
        logs/rank-N.log  what each rank printed
        ranks/N.json     written by the entrypoint as it starts the rank's command
        metrics.jsonl    what the workload reported, a line a time
        result.json      how it ended
    runs/latest          a link to the newest
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.entrypoint import finish
from toolkit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from toolkit.config import Setting
    from toolkit.job import JobSpec, Outcome

LATEST = "latest"
ENTRYPOINT = "entrypoint.pyz"  #: the packed entrypoint
WORKLOADS = "lib/workloads"  #: the built-in workloads: a folder that Python can run
_PACKAGE = Path(__file__).parent


@dataclass(frozen=True)
class RunDir:
    """A run's folder and what stands in it."""

    path: Path

    @property
    def metrics_file(self) -> Path:
        """What the workload reported, in JSON lines."""
        return self.path / "metrics.jsonl"

    @property
    def result_file(self) -> Path:
        """How the run ended."""
        return self.path / "result.json"

    @property
    def task_is(self) -> str:
        """What has a log of its own: a ``rank``, or under torchrun a ``node``."""
        return finish.task_is(self.record())

    def logs(self) -> list[Path]:
        """The logs that there will be, one a rank or node."""
        record = self.record()
        task_is = finish.task_is(record)
        count = record.get("num_nodes" if task_is == "node" else "world_size") or 0
        return [self.path / log_name(number, task_is) for number in range(count)]

    def log(self, rank: int) -> Path:
        """What a rank printed, where each has a log."""
        return self.path / log_name(rank)

    def rank_record(self, rank: int) -> dict[str, Any] | None:
        """What the entrypoint wrote as it started the rank's command; None if it did not."""
        return finish.read_json(str(self.path / "ranks" / f"{rank}.json"))

    def record(self) -> dict[str, Any]:
        """What runs where (``run.json``)."""
        return finish.read_json(str(self.path / "run.json")) or {}

    def result(self) -> dict[str, Any] | None:
        """How the run ended, or None while it has not."""
        return finish.read_json(str(self.result_file))

    def finish(self, outcome: Outcome) -> dict[str, Any]:
        """Write ``result.json`` from how the run ended and what it reported; return it."""
        result = finish.result(
            str(self.path),
            outcome.exit_code,
            outcome.failure,
            started=outcome.started,
            ended=outcome.ended,
            hosts=outcome.hosts,
        )
        finish.write_json(str(self.result_file), result)
        return result

    def element(self, index: int) -> RunDir:
        """The run directory of an array's element."""
        return RunDir(self.path.with_name(f"{self.path.name}_{index}"))

    def elements(self) -> list[RunDir]:
        """The run directories of an array's elements, in order; none where it is no array."""
        if "array" not in self.record().get("job", {}) or self.record().get("element") is not None:
            return []
        found = [RunDir(path) for path in self.path.parent.glob(f"{self.path.name}_*")]
        return sorted(found, key=lambda run: run.record().get("element") or 0)

    def update_record(self, **fields: object) -> None:
        """Add to ``run.json`` what is only known once the run was started, such as a job id."""
        finish.write_json(str(self.path / "run.json"), {**self.record(), **fields})


def find(which: str | None, folder: Path) -> RunDir:
    """The run that a user means: a folder, a run's name, a job id, or None for the newest.

    Raises:
        UsageError: if there is no such run.
    """
    if which is None:
        if not (folder / LATEST).is_dir():
            raise UsageError(f"There are no runs in {folder} yet. Name one, or use --runs DIR.")
        return RunDir((folder / LATEST).resolve())
    for path in (Path(which), folder / which):
        if (path / "run.json").is_file():
            return RunDir(path.resolve())
    if re.fullmatch(r"[0-9]+(_[0-9]+)?", which):
        for record in sorted(folder.glob("*/run.json"), reverse=True):
            run = RunDir(record.parent)
            if run.path.name != LATEST and run.record().get("job_id") == which:
                return run
    msg = f"{which}: no run of that folder, name or job id in {folder}. `ls {folder}` shows them."
    raise UsageError(msg)


def log_name(number: int, task_is: str = "rank") -> str:
    """Where a task's output goes, relative to the run directory."""
    return f"logs/{task_is}-{number}.log"


def root(setting: Setting | None, cwd: Path) -> Path:
    """The folder that holds the runs: ``--runs``, ``TOOLKIT_RUNS``, or ``./runs``."""
    return (cwd / Path(setting.value).expanduser()) if setting else cwd / "runs"


def name_for(job_name: str, now: float) -> str:
    """A run's name: ``NAME-TIME``, of characters that no mount option or shell trips over."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", job_name).strip("-.") or "job"
    return f"{safe}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}"


def candidates(folder: Path, name: str) -> Iterator[Path]:
    """NAME, NAME-2, NAME-3, … in ``folder``."""
    yield folder / name
    for number in itertools.count(2):
        yield folder / f"{name}-{number}"


def reserve(folder: Path, name: str) -> Path:
    """Make an empty run folder by an exclusive mkdir: two runs of one second get two folders.

    Raises:
        UsageError: if it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in candidates(folder, name):
            try:
                path.mkdir()
            except FileExistsError:
                continue
            return path
    except OSError as error:
        msg = (
            f"A run directory cannot be made in {folder}: {error.strerror}."
            " Choose another place with --runs DIR or TOOLKIT_RUNS."
        )
        raise UsageError(msg) from error
    raise AssertionError  # candidates() never ends


def fill(path: Path, record: Mapping[str, Any], *, workload: bool) -> RunDir:
    """Put into an empty run folder all that its ranks need, and point ``latest`` to it.

    Args:
        path: the folder.
        record: what ``run.json`` keeps.
        workload: whether the built-in workloads' code is needed.

    Raises:
        UsageError: if it cannot be filled; the folder is removed then.
    """
    from toolkit import pyz  # noqa: PLC0415 - only a run needs the packer

    try:
        for name in ("logs", "ranks"):
            (path / name).mkdir()
        pyz.write_entrypoint(path / ENTRYPOINT)
        if workload:
            _copy_workloads(path / "lib")
        finish.write_json(str(path / "run.json"), dict(record))
        _point_latest(path)
    except OSError as error:
        shutil.rmtree(path, ignore_errors=True)
        msg = f"The run directory {path} cannot be filled: {error}. Choose another with --runs DIR."
        raise UsageError(msg) from error
    return RunDir(path)


def stage_command(path: Path, record: Mapping[str, Any], *, workload: bool) -> tuple[str, ...]:
    """The command that makes and fills a run folder, for a script.

    ``-P`` keeps a folder called ``toolkit`` in the user's directory from being taken for this one.
    """
    command = (sys.executable, "-P", "-m", "toolkit.run_dir", str(path), json.dumps(record))
    return (*command, "--workload") if workload else command


def record_of(spec: JobSpec, target: str, cwd: Path, now: float) -> dict[str, Any]:
    """What ``run.json`` keeps of a job."""
    return {
        "created": now,
        "target": target,
        "host": platform.node(),
        "pid": os.getpid(),
        "cwd": str(cwd),
        "world_size": spec.ntasks,
        "num_nodes": spec.nodes,
        "job": spec.as_dict(),
        "code": _revision(cwd),
    }


def _copy_workloads(target: Path) -> None:
    """Copy the workloads and the part of the toolkit that they import."""
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
    shutil.copytree(_PACKAGE.parent / "workloads", target / "workloads", ignore=ignore)
    shutil.copytree(_PACKAGE / "entrypoint", target / "toolkit" / "entrypoint", ignore=ignore)
    shutil.copyfile(_PACKAGE / "__init__.py", target / "toolkit" / "__init__.py")


def _point_latest(path: Path) -> None:
    """Let ``latest`` point to the run, atomically: two runs may start at once."""
    scratch = path.parent / f".{LATEST}.{os.getpid()}"
    scratch.unlink(missing_ok=True)
    scratch.symlink_to(path.name)
    scratch.replace(path.parent / LATEST)


def _revision(cwd: Path) -> dict[str, Any] | None:
    """The git commit of the user's code and whether it was changed; None outside a checkout."""
    describe = ("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    try:
        said = subprocess.run(
            ["git", "-C", str(cwd), *describe],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return {"revision": said.removesuffix("-dirty"), "dirty": said.endswith("-dirty")}


def workload_names() -> list[str]:
    """The built-in workloads: the modules directly in ``workloads/``."""
    files = (_PACKAGE.parent / "workloads").glob("[!_]*.py")
    return sorted(file.stem for file in files)


def main(argv: list[str]) -> None:
    """``python -m toolkit.run_dir PATH RECORD [--workload]``: what a printed plan starts with."""
    path, record, *rest = argv
    folder = Path(path)
    made = reserve(folder.parent, folder.name)
    if made != folder:
        made.rmdir()
        msg = f"{folder} exists already: this plan has been run. Print it anew with --dry-run."
        raise UsageError(msg)
    fill(folder, json.loads(record), workload=rest == ["--workload"])


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UsageError as error:
        print(f"toolkit: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
