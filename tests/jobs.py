"""Jobs as :mod:`toolkit.decide` decides them, without asking anybody."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit import decide
from toolkit.image import reference
from toolkit.options import JobSpec
from toolkit.slurm import environment

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from toolkit.job import Job

PYTHON = "/venv/bin/python"


def make_spec(**options: Any) -> JobSpec:
    """A specification; ``env_names`` are the variables that ``--env NAME`` passes on."""
    names = options.pop("env_names", ())
    options["env"] = (*options.get("env", ()), *((name, None) for name in names))
    default = {} if "workload" in options else {"command": ("python", "train.py")}
    return JobSpec(**{"job_name": "train", **default, **options})


def decided(
    environ: Mapping[str, str] | None = None,
    *,
    target: str = "slurm",
    batch: bool = False,
    cwd: Path = Path("/home/u/proj"),
    run_dir: Path = Path("/home/u/proj/runs/train-1"),
    exists: Callable[[str], bool] = lambda _: True,
    allocated: bool = True,
    notes: tuple[str, ...] = (),
    build: str = "",
    python: str = PYTHON,
    spec: JobSpec | None = None,
    **options: Any,
) -> Job:
    """A job in ``run_dir``; in the allocation that ``environ`` describes, where ``allocated``."""
    spec = dataclasses.replace(spec or make_spec(**options), runs=str(run_dir.parent))
    environ = environ or {}
    image = reference.parse(spec.container_image) if spec.container_image else None
    inside = target == "slurm" and not batch and allocated
    decide.require(spec, environ)
    job = decide.assemble(
        spec,
        target,
        cwd=cwd,
        environ=environ,
        batch=batch,
        image=image,
        build=build,
        allocation=environment.allocation(environ) if inside else None,
        notes=notes,
        exists=exists,
    )
    return dataclasses.replace(job.at(run_dir), record={}, host_python=python)
