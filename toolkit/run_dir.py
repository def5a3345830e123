"""Run directories: one folder a run, on storage that all nodes see. See run_files for its files."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.common.capture import capture
from toolkit.entrypoint import finish, processes, run_files
from toolkit.entrypoint.run_files import write_whole
from toolkit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from toolkit.plan import Outcome

LATEST = "latest"  #: a link to the newest run, beside the runs
_PACKAGE = Path(__file__).parent
GIT_LIMIT_S = 10


@dataclass(frozen=True)
class RunDir:
    """A run's folder and what stands in it."""

    path: Path

    @property
    def metrics_file(self) -> Path:
        return self.path / run_files.METRICS

    @property
    def result_file(self) -> Path:
        return self.path / run_files.RESULT

    def tasks(self) -> tuple[int, str]:
        """How many logs there will be, and of what: a ``rank``, or under torchrun a ``node``."""
        record = self.record()
        task = finish.task_is(record)
        return int(record.get("num_nodes" if task == run_files.NODE else "world_size") or 0), task

    def log(self, rank: int) -> Path:
        """What a rank printed, where each has a log."""
        return self.path / run_files.log(rank)

    def rank_record(self, rank: int) -> dict[str, Any] | None:
        """What the entrypoint wrote as it started the rank's command; None if it did not."""
        return finish.read_json(str(self.path / run_files.rank_record(rank)))

    def record(self) -> dict[str, Any]:
        """What runs where (``run.json``)."""
        return finish.read_json(str(self.path / run_files.RECORD)) or {}

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
        finish.write_json(str(self.path / run_files.RECORD), {**self.record(), **fields})


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
        if (path / run_files.RECORD).is_file():
            return RunDir(path.resolve())
    if re.fullmatch(r"[0-9]+(_[0-9]+)?", which):
        for record in sorted(folder.glob(f"*/{run_files.RECORD}"), reverse=True):
            run = RunDir(record.parent)
            if run.path.name != LATEST and run.record().get("job_id") == which:
                return run
    msg = f"{which}: no run of that folder, name or job id in {folder}. `ls {folder}` shows them."
    raise UsageError(msg)


def root(runs: str | None, cwd: Path) -> Path:
    """The folder that holds the runs: ``--runs``, ``TOOLKIT_RUNS``, or ``./runs``."""
    return cwd / Path(runs).expanduser() if runs else cwd / "runs"


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


def fill(
    path: Path,
    record: Mapping[str, Any],
    *,
    workload: bool,
    pid: int,
    files: Mapping[str, str] | None = None,
) -> RunDir:
    """Put into an empty run folder all that its ranks need, and point ``latest`` to it.

    Args:
        path: the folder.
        record: what ``run.json`` keeps.
        workload: whether the built-in workloads' code is needed.
        pid: the process that the run lives and dies with.
        files: more texts, by name.

    Raises:
        UsageError: if it cannot be filled; the folder is removed then.
    """
    from toolkit import pyz  # noqa: PLC0415 - only a run needs the packer

    try:
        for name in (run_files.LOGS, run_files.RANKS):
            (path / name).mkdir()
        pyz.write_entrypoint(path / run_files.ENTRYPOINT)
        if workload:
            _copy_workloads(path / run_files.LIB)
        for name, text in (files or {}).items():
            write_whole(path / name, text)
        begun = {"created": time.time(), **processes.identify(pid)}
        finish.write_json(str(path / run_files.RECORD), {**begun, **record})
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


def revision(cwd: Path) -> dict[str, Any] | None:
    """The git commit of the user's code and whether it was changed; None outside a checkout."""
    question = ("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    asked = capture(["git", "-C", str(cwd), *question], GIT_LIMIT_S)
    if not asked.ok:
        return None
    said = asked.stdout.strip()
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
    # What waits for the ranks, and can be cancelled, is the shell that this plan was pasted into.
    fill(folder, json.loads(record), workload=rest == ["--workload"], pid=os.getppid())


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UsageError as error:
        print(f"toolkit: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
