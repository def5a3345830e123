"""Graphs of any size with known classes: a degree-corrected planted partition.

Every node has a class. A node's number of neighbours follows a power law; a neighbour is of the
node's own class with probability ``SAME``, else of any class, and within a class some nodes (the
hubs) are far more likely than others. Features are Gaussian noise around a mean of the class, so
close to each other that one node's features say little and the average over its neighbours says
most: a model has to use the edges. Repeated edges can occur, as in any such model (Karrer and
Newman, 2011).

All numbers come from Philox generators keyed by the seed and the part they are for, so a graph
depends on its shape alone. It is written part by part: memory holds a few numbers per node and
one part of the edges.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from workloads.common.errors import WorkloadError
from workloads.common.graph import create_array, finish_graph, index_dtype, save_array, write_rows
from workloads.common.prepare import Recipe

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from numpy.typing import NDArray

    from workloads.common.prepare import Pieces

SAME = 0.6  # probability that a neighbour is drawn from the node's own class
HUBS = 2.0  # the k-th most popular of n nodes is drawn with probability ~ k^(1/HUBS - 1)
SIGNAL = 1.5  # distance of a class mean from the origin; the noise has standard deviation 1
PART = 1 << 21  # numbers (edges or features) in memory at a time
_WEIGHTS, _EDGES, _FEATURES, _CLASSES, _MEANS, _SPLIT = range(6)


@dataclass(frozen=True)
class Shape:
    """Everything that decides a planted graph."""

    num_nodes: int
    num_edges: int
    num_features: int
    num_classes: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_classes < 2 or self.num_nodes < max(10, 2 * self.num_classes):
            msg = (
                f"a planted graph needs 2 classes or more, 2 nodes a class and 10 in all: "
                f"--num-nodes {self.num_nodes} --num-classes {self.num_classes}"
            )
            raise WorkloadError(msg)
        if self.num_edges < 0 or self.num_features < 1:
            msg = (
                f"a planted graph needs --num-edges of 0 or more and --num-features of 1 or more, "
                f"not {self.num_edges} and {self.num_features}"
            )
            raise WorkloadError(msg)

    @property
    def folder(self) -> str:
        """The name of the folder that holds this graph."""
        return (
            f"planted-n{self.num_nodes}-e{self.num_edges}-f{self.num_features}"
            f"-c{self.num_classes}-s{self.seed}"
        )

    def generator(self, stream: int, part: int = 0) -> np.random.Generator:
        """The random numbers of one part of one stream."""
        return np.random.Generator(np.random.Philox(key=[self.seed, (stream << 32) + part]))


def recipe(shape: Shape, version: int) -> Recipe:
    """How a graph of this shape is made."""
    return Recipe(
        f"{shape.folder}-v{version}",
        partial(start, shape=shape),
        partial(pieces, shape=shape),
        partial(finish_graph, num_classes=shape.num_classes),
    )


def start(folder: Path, shape: Shape) -> None:
    """Write the small arrays, and make room for the large ones."""
    classes = shape.generator(_CLASSES).integers(shape.num_classes, size=shape.num_nodes)
    y = classes.astype(np.int16 if shape.num_classes < 2**15 else np.int32)
    del classes
    save_array(folder, "y", y)

    shuffled = shape.generator(_SPLIT).permutation(shape.num_nodes)
    node = index_dtype(shape.num_nodes)
    first, second = shape.num_nodes // 2, shape.num_nodes * 6 // 10
    for name, nodes in zip(
        ("train", "val", "test"), np.split(shuffled, [first, second]), strict=True
    ):
        save_array(folder, name, np.sort(nodes).astype(node))

    save_array(folder, "indptr", _indptr(shape))
    create_array(folder, "indices", (shape.num_edges,), node)
    create_array(folder, "x", (shape.num_nodes, shape.num_features), np.float32)


def pieces(folder: Path, shape: Shape) -> Pieces:
    """What fills the large arrays, part by part."""
    y, indptr = np.load(folder / "y.npy"), np.load(folder / "indptr.npy")
    means = shape.generator(_MEANS).standard_normal(
        (shape.num_classes, shape.num_features), dtype=np.float32
    )
    means *= SIGNAL / np.linalg.norm(means, axis=1, keepdims=True)
    counted = np.arange(shape.num_nodes + 1, dtype=np.int64) * shape.num_features
    edges, features = _Edges(folder, shape, y, indptr), _Features(folder, shape, y, means)
    return {
        **{f"edges-{i}": partial(edges.write, i, *part) for i, part in enumerate(_parts(indptr))},
        **{
            f"features-{i}": partial(features.write, i, *part)
            for i, part in enumerate(_parts(counted))
        },
    }


def _indptr(shape: Shape) -> NDArray[np.int64]:
    """Give every node its share of the edges, which add up to the number asked for."""
    # A Pareto tail with its far end cut off, so that no node takes half of a small graph.
    weight = shape.generator(_WEIGHTS).pareto(2.0, shape.num_nodes).clip(max=100) + 0.5
    total = np.cumsum(weight)
    indptr = np.zeros(shape.num_nodes + 1, dtype=np.int64)
    np.floor(total * (shape.num_edges / total[-1]), out=total)
    indptr[1:] = total
    indptr[-1] = shape.num_edges
    return indptr


class _Edges:
    def __init__(
        self, folder: Path, shape: Shape, y: NDArray[Any], indptr: NDArray[np.int64]
    ) -> None:
        self.folder, self.shape, self.y, self.indptr = folder, shape, y, indptr
        self.by_class = np.argsort(y, kind="stable").astype(index_dtype(shape.num_nodes))
        self.size = np.bincount(y, minlength=shape.num_classes)
        self.start = np.concatenate([[0], np.cumsum(self.size)[:-1]])

    def write(self, part: int, low: int, high: int) -> None:
        """Draw the neighbours of the nodes from ``low`` to before ``high``."""
        random = self.shape.generator(_EDGES, part)
        wanted = np.repeat(self.y[low:high], np.diff(self.indptr[low : high + 1]))
        other = random.random(len(wanted), dtype=np.float32) >= SAME
        wanted[other] = self.y[random.integers(self.shape.num_nodes, size=int(other.sum()))]
        place = (random.random(len(wanted)) ** HUBS * self.size[wanted]).astype(np.int64)
        neighbours = self.by_class[self.start[wanted] + place]
        write_rows(self.folder, "indices", int(self.indptr[low]), neighbours)


class _Features:
    def __init__(
        self, folder: Path, shape: Shape, y: NDArray[Any], means: NDArray[np.float32]
    ) -> None:
        self.folder, self.shape, self.y, self.means = folder, shape, y, means

    def write(self, part: int, low: int, high: int) -> None:
        """Draw the features of the nodes from ``low`` to before ``high``."""
        x = self.shape.generator(_FEATURES, part).standard_normal(
            (high - low, self.shape.num_features), dtype=np.float32
        )
        x += self.means[self.y[low:high]]
        write_rows(self.folder, "x", low, x)


def _parts(end: NDArray[np.int64]) -> Iterable[tuple[int, int]]:
    """Cut the nodes into parts of about PART numbers each: the first node, and the one after.

    Args:
        end: [nodes + 1]: how many numbers there are up to each node.
    """
    cuts = np.searchsorted(end, np.arange(PART, int(end[-1]), PART))
    return pairwise(np.unique([0, *cuts, len(end) - 1]).tolist())
