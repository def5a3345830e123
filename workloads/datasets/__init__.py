"""The data sets: each is a recipe that fills a folder with the arrays of ``common.graph``."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from workloads.common.errors import WorkloadError
from workloads.datasets import debian, planted

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable
    from pathlib import Path

NAMES = ("debian", "planted")


@dataclass(frozen=True)
class Recipe:
    """A data set: the name of its folder, which stands for its content, and what fills it."""

    folder: str
    build: Callable[[Path], None]


def recipe(options: Namespace) -> Recipe:
    """Find the recipe for ``--dataset`` and the options that belong to it."""
    if options.dataset == "planted":
        shape = planted.Shape(
            options.num_nodes,
            options.num_edges,
            options.num_features,
            options.num_classes,
            options.data_seed,
        )
        return Recipe(shape.folder, partial(planted.build, shape=shape))
    try:
        digest = hashlib.sha256(debian.FILE.read_bytes()).hexdigest()[:12]
    except OSError as error:
        msg = f"the data set file {debian.FILE} cannot be read: {error}"
        raise WorkloadError(msg) from error
    return Recipe(f"debian-{digest}", debian.build)
