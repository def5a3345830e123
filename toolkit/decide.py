"""From options and words to the decided job: the one place where a job's questions are answered."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from toolkit import config, run_dir
from toolkit.common.environment import left_out
from toolkit.entrypoint import run_files
from toolkit.errors import UsageError
from toolkit.job import Container, Job
from toolkit.options import DEFAULT_WORKLOAD, TARGETS, JobSpec, table
from toolkit.slurm import environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from toolkit.config import Setting
    from toolkit.image.reference import Reference
    from toolkit.job import Allocation

    Settings = Mapping[str, Setting]
    Say = Callable[[str], None]


def decide(
    settings: Settings,
    words: list[str],
    *,
    explicit_command: bool,
    cwd: Path,
    environ: Mapping[str, str] = os.environ,
    batch: bool = False,
    dry_run: bool = False,
    say: Say = lambda _: None,
) -> Job:
    """The job of a command line.

    Args:
        settings: the options, from :func:`toolkit.config.settings`.
        words: what stands behind the options: a workload's name and its arguments, or a command.
        explicit_command: whether ``--`` stood before them.
        cwd: the current directory.
        environ: the caller's environment.
        batch: whether the job is handed to sbatch.
        dry_run: whether nothing may be imported, and no registry asked.
        say: gets what the user should know at once.

    Raises:
        UsageError: if an option or word is wrong, or contradicts another.
        ToolkitError: if the image was to be imported and cannot be.
    """
    spec = make_spec(settings, words, explicit_command=explicit_command)
    target, why = choose(settings, environ, batch=batch)
    require(spec, environ)
    image, build = None, ""
    if spec.container_image is not None:
        image, build = _resolve(spec, target, cwd, environ, dry_run=dry_run, say=say)
    allocation, stale = None, ""
    if target == "slurm" and not batch:
        allocation, stale = _allocation(environ)
    return assemble(
        spec,
        target,
        cwd=cwd,
        environ=environ,
        batch=batch,
        image=image,
        build=build,
        allocation=allocation,
        notes=[stale] if stale else [],
        why=why,
    )


def assemble(
    spec: JobSpec,
    target: str,
    *,
    cwd: Path,
    environ: Mapping[str, str],
    batch: bool = False,
    image: Reference | None = None,
    build: str = "",
    allocation: Allocation | None = None,
    notes: Iterable[str] = (),
    why: str = "",
    exists: Callable[[str], bool] = os.path.exists,
) -> Job:
    """The job of a specification, where everything that others have to be asked is known.

    Args:
        spec: what the job is asked to be.
        target: where it runs.
        cwd: the current directory.
        environ: the caller's environment.
        batch: whether the job is handed to sbatch.
        image: its image; None for none.
        build: what TOOLKIT_IMAGE_BUILD has to be in it.
        allocation: the job of Slurm's that this one is a step of.
        notes: what the user should know.
        why: why it runs there.
        exists: whether a path is on this machine.

    Raises:
        UsageError: if an option is wrong, or something of the user's cannot be passed on.
    """
    if batch:
        from toolkit.slurm import sbatch  # noqa: PLC0415 - a dry run of toolkit run does without

        spec = replace(spec, signal=sbatch.signal_of(spec))
    container = None
    told = list(notes)
    if image is not None and target != "local":
        container, more = _container(spec, image, build, cwd, environ, exists=exists)
        told += more
    asked = dict(spec.env)
    runs = run_dir.root(spec.runs, cwd)
    if spec.rendezvous == "file" and container is None:
        _passes_through_url(runs)
    return Job(
        spec=spec,
        target=target,
        batch=batch,
        cwd=cwd,
        environ=environ,
        runs=runs,
        run_dir=runs / run_dir.name_for(spec.job_name, time.time()),
        record={
            "target": target,
            "cwd": str(cwd),
            "world_size": spec.world_size,
            "num_nodes": spec.nodes,
            "job": spec.as_dict() | (_resolved(container) if container else {}),
            "code": run_dir.revision(cwd),
        },
        container=container,
        allocation=allocation,
        unset=environment.outer(environ, asked, step=allocation is not None),
        left_out=left_out(environ, asked) if container else (),
        renamed=config.renamed(environ),
        notes=tuple(told),
        why=why,
    )


# ---- what is to run


def make_spec(settings: Settings, words: list[str], *, explicit_command: bool) -> JobSpec:
    """What the job is asked to be; the tutorials' flags come out in the per-node form.

    Raises:
        UsageError: if a value is out of range or contradicts another, or the first word is no
            workload and no ``--`` marks it as a command.
    """
    command, workload, arguments = _what(words, explicit_command=explicit_command)
    found: dict[str, Any] = {}
    for key, option in table().items():
        setting = settings.get(key)
        if setting is None:
            continue
        value = tuple(setting.value) if option.kind is list else setting.value
        found[key] = option.read(setting.value, setting.source) if option.read else value
    nodes, ntasks_per_node, gpus_per_node = _layout(found, settings)
    found |= {
        "nodes": nodes,
        "ntasks": None,
        "ntasks_per_node": ntasks_per_node,
        "gpus_per_node": gpus_per_node,
        "gpus_per_task": None,
        "job_name": found.get("job_name") or workload or _stem(command),
    }
    return JobSpec(command=command, workload=workload, workload_args=arguments, **found)


def _what(
    words: list[str], *, explicit_command: bool
) -> tuple[tuple[str, ...], str | None, tuple[str, ...]]:
    """Command, workload and the workload's arguments; with no word at all the default workload."""
    if not words:
        return (), DEFAULT_WORKLOAD, ()
    if explicit_command:
        return tuple(words), None, ()
    name, *arguments = words
    known = run_dir.workload_names()
    if name not in known:
        msg = config.unknown("workload", name, known)
        raise UsageError(f"{msg} To run a command of your own, put it after --.")
    return (), name, tuple(arguments)


def _stem(command: tuple[str, ...]) -> str:
    """A job name from a command: the script's name without its ending, else the program's."""
    named = next((word for word in command if word.endswith((".py", ".sh"))), command[0])
    return named.rstrip("/").rpartition("/")[2].removesuffix(".py").removesuffix(".sh") or "job"


def _layout(found: Mapping[str, Any], settings: Settings) -> tuple[int, int, int | None]:
    """``(nodes, ntasks_per_node, gpus_per_node)``; --ntasks and --gpus-per-task folded in."""
    nodes, ntasks = found.get("nodes"), found.get("ntasks")
    per_node, gpus = found.get("ntasks_per_node"), found.get("gpus_per_node")
    gpus_per_task = found.get("gpus_per_task")
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


def require(spec: JobSpec, environ: Mapping[str, str]) -> None:
    """Raise UsageError where ``--env NAME`` names a variable that is not set."""
    for name in spec.env_names:
        if name not in environ:
            msg = f"--env {name}: {name} is not set in your environment. Export it first."
            raise UsageError(msg)


# ---- where it runs


def choose(settings: Settings, environ: Mapping[str, str], *, batch: bool) -> tuple[str, str]:
    """The target that ``--on`` names, or that ``auto`` finds, and why.

    Raises:
        UsageError: if a batch job is to run elsewhere than on Slurm.
    """
    on = settings.get("on")
    if batch:
        if on is not None and on.value not in {"auto", "slurm"}:
            msg = f"{on.source}: a batch job goes to Slurm; `toolkit run` runs elsewhere."
            raise UsageError(msg)
        return "slurm", "a batch job"
    if on is not None and on.value in TARGETS:
        return str(on.value), f"asked for by {on.source}"
    from toolkit.slurm import probe  # noqa: PLC0415 - only "auto" asks

    why = probe.unreachable(environ)
    if why is None:
        return "slurm", "a Slurm controller answers"
    return "local", f"no Slurm here: {why}"


def _allocation(environ: Mapping[str, str]) -> tuple[Allocation | None, str]:
    """The job of Slurm's that we are in, or why what the variables say of one does not count."""
    found = environment.allocation(environ)
    if found is None:
        return None, ""
    from toolkit.slurm import queue  # noqa: PLC0415 - only in an allocation

    stale = queue.stale(found.job_id, environ)
    return (None, stale) if stale else (found, "")


def _passes_through_url(runs: Path) -> None:
    """Raise UsageError for a folder that a file:// address would not carry whole."""
    wrong = sorted(set("?#\t\r\n") & set(str(runs)))
    if wrong:
        msg = (
            f"--rendezvous file: {runs} has a {wrong[0]!r}, which cuts a file:// address short."
            " Choose another folder with --runs DIR."
        )
        raise UsageError(msg)


# ---- its image


def _resolve(
    spec: JobSpec,
    target: str,
    cwd: Path,
    environ: Mapping[str, str],
    *,
    dry_run: bool,
    say: Say,
) -> tuple[Reference, str]:
    """The image that is meant, and its build where that is known.

    It is the one that ``toolkit push`` wrote into ``image.lock``; on Slurm its imported file where
    there is one. A dry run asks no registry.
    """
    from toolkit.image import pin, reference  # noqa: PLC0415 - a job without an image does without

    assert spec.container_image is not None
    image, build = pin.pinned(reference.parse(spec.container_image), cwd, say)
    if target != "slurm" or image.is_file or image.scheme == "dockerd":
        return image, build
    from toolkit.enroot import images  # noqa: PLC0415 - as above

    folder = images.Images(images.folder(spec.images, cwd))
    if dry_run:
        found = images.find_known(image, folder)
    else:
        found = images.resolve(image, folder, environ, import_first=spec.import_image, say=say)
    return (reference.parse(str(found.path)) if found else image), build


def _container(
    spec: JobSpec,
    image: Reference,
    build: str,
    cwd: Path,
    environ: Mapping[str, str],
    *,
    exists: Callable[[str], bool],
) -> tuple[Container, list[str]]:
    """The container that ranks run in, and notes about it.

    Raises:
        UsageError: if a mount or the working directory cannot be what was given.
    """
    from toolkit import mounts  # noqa: PLC0415 - milliseconds that others need not pay

    mounted, notes = mounts.decide(spec, cwd, environ, exists)
    targets = [mount.target for mount in mounted]
    workdir = mounts.workdir(spec, cwd, mounted)
    if workdir is None:
        notes.append(
            f"{cwd} is not mounted: the command starts in the image's own working directory"
        )
    elif spec.container_workdir and not mounts.under(workdir, targets):
        notes.append(
            f"--container-workdir {workdir} is under no mount: the container does not start"
            " where the image has no such directory"
        )
    if not spec.container_writable:
        home = environ.get("HOME") if spec.container_mount_home else None
        places = [*targets, run_files.IN_CONTAINER, *filter(None, [home])]
        notes += mounts.unmounted_outputs((*spec.command, *spec.workload_args), places)
    if image.is_file:
        image = replace(image, path=mounts.absolute(image.path, cwd))
        if not exists(image.path):
            notes.append(f"{image.path} is not on this machine; it must be on the compute nodes")
    return Container(image=image, build=build, mounts=tuple(mounted), workdir=workdir), notes


def _resolved(container: Container) -> dict[str, str]:
    """What ``run.json`` says of the image: the one that was started, not what it was called."""
    image = container.image
    shown = {"container_image": image.path if image.is_file else image.docker()}
    return shown | ({"container_build": container.build} if container.build else {})
