"""A graph as a folder of ``.npy`` files, which all processes of a node map and so share.

Ranks that srun starts have no parent in common, so memory can be shared through files alone.
A folder holds:

========== ============================== ====================================================
file       shape, type                    meaning
========== ============================== ====================================================
indptr     [nodes + 1], int64             where each node's neighbours start in ``indices``
indices    [edges], int32 (or int64)      the nodes whose messages a node receives (CSC)
x          [nodes, features], any number  features
y          [nodes], any integer           classes
train      [n], int32 (or int64)          node numbers for training; ``val`` and ``test`` alike
========== ============================== ====================================================

and ``graph.json``: the number of classes, and name, shape and type of every array.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workloads.common.errors import WorkloadError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from numpy.typing import ArrayLike, DTypeLike, NDArray

ARRAYS = ("indptr", "indices", "x", "y", "train", "val", "test")


@dataclass(frozen=True)
class Graph:
    """The arrays of a graph, mapped from files; see the module for shapes and types."""

    indptr: NDArray[Any]
    indices: NDArray[Any]
    x: NDArray[Any]
    y: NDArray[Any]
    train: NDArray[Any]
    val: NDArray[Any]
    test: NDArray[Any]
    num_classes: int

    @property
    def num_nodes(self) -> int:
        """How many nodes the graph has."""
        return len(self.y)

    @property
    def num_edges(self) -> int:
        """How many edges the graph has; one used both ways counts twice."""
        return len(self.indices)

    @property
    def num_features(self) -> int:
        """How many features a node has."""
        return int(self.x.shape[1])


def index_dtype(count: int) -> type[np.signedinteger[Any]]:
    """Return the smallest type that numbers ``count`` things: half the memory where it is int32."""
    return np.int32 if count <= np.iinfo(np.int32).max else np.int64


def open_graph(folder: Path, *, private: bool = False) -> Graph:
    """Map the arrays in a folder.

    Args:
        folder: What ``prepare`` made.
        private: Read the arrays into this process's own memory instead of mapping them.

    Raises:
        WorkloadError: A file is missing, cut short or not what ``graph.json`` says.
    """
    try:
        return _open(folder, private)
    except Exception as error:  # what numpy and json raise is of many kinds
        msg = (
            f"the prepared graph in {folder} is damaged ({error}); "
            f"remove that folder and run again, and it is made anew"
        )
        raise WorkloadError(msg) from error


def _open(folder: Path, private: bool) -> Graph:  # noqa: FBT001 - private, called once
    about = json.loads((folder / "graph.json").read_text())
    arrays = {}
    for name in ARRAYS:
        # Copy-on-write, because torch warns of memory that it may not write; nothing writes,
        # so the pages stay the page cache's own and all processes share them.
        array = np.load(folder / f"{name}.npy", mmap_mode=None if private else "c")
        said = about["arrays"][name]
        if [list(array.shape), array.dtype.str] != said:
            raise ValueError(f"{name}.npy is {array.shape} {array.dtype.str}, not {said}")
        arrays[name] = array
    graph = Graph(**arrays, num_classes=int(about["num_classes"]))
    if graph.indptr[0] != 0 or graph.indptr[-1] != graph.num_edges:
        raise ValueError(f"indptr.npy ends at {graph.indptr[-1]}, indices at {graph.num_edges}")
    return graph


def create_array(folder: Path, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> None:
    """Make a ``.npy`` file of zeros, for ``write_rows`` to fill."""
    dtype = np.dtype(dtype)
    with (folder / f"{name}.npy").open("wb") as file:
        header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        file.truncate(file.tell() + math.prod(shape) * dtype.itemsize)


def write_rows(folder: Path, name: str, start: int, rows: ArrayLike) -> None:
    """Write some rows of an array, so that memory holds a part of it and never the whole."""
    with (folder / f"{name}.npy").open("r+b") as file:
        np.lib.format.read_magic(file)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        part = np.ascontiguousarray(rows, dtype=dtype)
        if part.shape[1:] != shape[1:] or start + len(part) > shape[0]:
            msg = f"{name}.npy is {shape}, and {part.shape} from row {start} do not fit"
            raise RuntimeError(msg)
        file.seek(start * math.prod(shape[1:]) * dtype.itemsize, os.SEEK_CUR)
        file.write(part.tobytes())


def finish_graph(folder: Path, num_classes: int) -> None:
    """Write ``graph.json`` once all arrays are in the folder."""
    arrays = {}
    for name in ARRAYS:
        array = np.load(folder / f"{name}.npy", mmap_mode="r")
        arrays[name] = [list(array.shape), array.dtype.str]
    about = {"num_classes": num_classes, "arrays": arrays}
    (folder / "graph.json").write_text(json.dumps(about, indent=1) + "\n")


@contextlib.contextmanager
def whole_or_not(folder: Path, name: str) -> Iterator[str]:
    """Give another name to write an array under, and then its own: two may write it at a time."""
    unfinished = f"{name}-{uuid.uuid4().hex}"
    try:
        yield unfinished
        (folder / f"{unfinished}.npy").replace(folder / f"{name}.npy")
    finally:
        (folder / f"{unfinished}.npy").unlink(missing_ok=True)


def save_array(folder: Path, name: str, array: ArrayLike) -> None:
    """Write an array that is in memory anyway."""
    with whole_or_not(folder, name) as unfinished:
        np.save(folder / f"{unfinished}.npy", array)


def write_edges(
    folder: Path,
    num_nodes: int,
    edges: Callable[[], Iterable[tuple[NDArray[Any], NDArray[Any]]]],
) -> None:
    """Write ``indptr`` and ``indices`` for edges that are read twice: a counting sort by target.

    Args:
        folder: Where to.
        num_nodes: How many nodes there are.
        edges: Starts anew at each call: parts of the sources, and of the targets.

    Raises:
        ValueError: They are not edges between so many nodes.
    """
    degree = np.zeros(num_nodes, dtype=np.int64)
    for source, target in edges():
        if len(source) != len(target) or (len(source) and source.max() >= num_nodes):
            msg = f"an edge has one end, or one that is none of the {num_nodes} nodes"
            raise ValueError(msg)
        degree += np.bincount(target, minlength=num_nodes)
    indptr = np.concatenate([[0], np.cumsum(degree)])
    save_array(folder, "indptr", indptr)
    with whole_or_not(folder, "indices") as unfinished:
        create_array(folder, unfinished, (int(indptr[-1]),), index_dtype(num_nodes))
        indices = np.load(folder / f"{unfinished}.npy", mmap_mode="r+")
        free = indptr[:-1].copy()
        for source, target in edges():
            order = np.argsort(target, kind="stable")
            target = target[order]  # noqa: PLW2901 - the same edges, sorted
            # The place of an edge among those of this part with the same target.
            place = np.arange(len(target)) - np.searchsorted(target, target)
            indices[free[target] + place] = source[order]
            free += np.bincount(target, minlength=num_nodes)
        indices.flush()
