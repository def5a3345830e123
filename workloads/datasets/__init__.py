"""The data sets: each is a recipe that fills a folder with the arrays of ``common.graph``."""

from __future__ import annotations

import hashlib
import os
import traceback
from typing import TYPE_CHECKING

from workloads.common.errors import WorkloadError
from workloads.common.graph import Graph, open_graph
from workloads.common.prepare import Recipe, default_root, prepare, wait_for
from workloads.datasets import debian, planted, public

if TYPE_CHECKING:
    from argparse import Namespace

    from workloads.common.ranks import Ranks

# Goes up when a change makes folders that were prepared before it wrong.
FORMAT = 1
NAMES = ("debian", "planted", "reddit", "ogbn-products")


def recipe(options: Namespace) -> Recipe:
    """Find the recipe for ``--dataset`` and the options that belong to it.

    Raises:
        WorkloadError: The options or the shipped file cannot be used.
    """
    if options.dataset == "planted":
        shape = planted.Shape(
            options.num_nodes,
            options.num_edges,
            options.num_features,
            options.num_classes,
            options.data_seed,
        )
        return planted.recipe(shape, FORMAT)
    if options.dataset in public.SOURCES:
        return public.recipe(options.dataset, FORMAT)
    try:
        digest = hashlib.sha256(debian.FILE.read_bytes()).hexdigest()[:12]
    except OSError as error:
        raise debian.damaged(debian.FILE, error) from error
    return Recipe(f"debian-{digest}-v{FORMAT}", debian.build)


def load(ranks: Ranks, recipe: Recipe, options: Namespace) -> Graph:
    """Map the graph, prepared by the ranks of each node, or by all of them on shared storage.

    Raises:
        WorkloadError: On all ranks, where one of them cannot prepare or read it.
    """
    limit = options.data_timeout

    def check() -> None:
        ranks.check("data")

    error = None
    try:
        root = options.data_dir or default_root(os.environ)
        if ranks.world.local_rank == 0:
            folder = prepare(root, recipe, timeout=limit, check=check)
        else:
            folder = wait_for(root, recipe, timeout=limit, check=check)
        graph = open_graph(folder)
    except WorkloadError as failure:
        error = failure
    except Exception as failure:  # noqa: BLE001 - printed, and told to all ranks
        # A fault in the program, which must not leave the other ranks waiting either.
        traceback.print_exc()
        error = WorkloadError(f"the data set could not be prepared: {failure!r}", 1)
    ranks.agree("data", error, timeout=limit + 30)
    return graph
