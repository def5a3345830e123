"""Neighbour sampling: exact, without replacement, vectorised over all nodes of a batch.

``TorchSampler`` draws from a generator of its own, so that it may run in a thread of its own and
give the same batches every time; pyg-lib draws from torch's, which dropout on a CPU draws from too.
"""

from __future__ import annotations

import importlib.util
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from workloads.common.errors import WorkloadError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

# Said once by every process; the few operations that are needed here are tested.
warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")


@dataclass(frozen=True)
class Batch:
    """What a model needs to compute the seeds of one step.

    Attributes:
        nodes: [n], int64: the nodes whose features are read; the seeds come first.
        adjacency: One matrix a layer, first layer first: sparse CSR, [targets, sources]. The
            targets are the first of the sources, and they are the next layer's sources.
    """

    nodes: Tensor
    adjacency: list[Tensor]


def choose_neighbours(
    indptr: Tensor, indices: Tensor, nodes: Tensor, fanout: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Choose up to ``fanout`` distinct neighbours of every node, each set equally likely.

    Floyd's algorithm: to choose k of n, draw t from 0..j for j = n-k .. n-1, and take j itself
    where t is taken already. Each of the k steps is done for all nodes at once.

    Returns:
        ``offsets`` ([nodes + 1], int64) and ``neighbours`` (int64): those of ``nodes[i]`` are
        ``neighbours[offsets[i]:offsets[i + 1]]``. All of them where a node has no more than
        ``fanout``.
    """
    start = indptr[nodes]
    degree = indptr[nodes + 1] - start
    position = torch.arange(fanout).repeat(len(nodes), 1)
    kept = position < degree[:, None]

    many = (degree > fanout).nonzero().squeeze(1)
    lowest = degree[many] - fanout
    chosen = torch.empty(len(many), fanout, dtype=torch.int64)
    for step in range(fanout):
        last = lowest + step
        # float64: a float32 has 24 bits, too few for a hub's neighbours.
        draw = torch.rand(len(many), dtype=torch.float64, generator=generator)
        drawn = (draw * (last + 1)).long()
        taken = (chosen[:, :step] == drawn[:, None]).any(dim=1)
        chosen[:, step] = torch.where(taken, last, drawn)
    position[many] = chosen

    offsets = torch.zeros(len(nodes) + 1, dtype=torch.int64)
    torch.cumsum(degree.clamp(max=fanout), dim=0, out=offsets[1:])
    return offsets, indices[(start[:, None] + position)[kept]].long()


class TorchSampler:
    """Samples the part of a graph that the layers of a GNN need, in plain torch.

    Args:
        indptr: [nodes + 1], int64: where each node's neighbours start in ``indices``.
        indices: [edges], int32 or int64; may be a mapped file, only what is needed is read.
        fanout: Neighbours of a seed, then of those, and so on; one number a layer.
        seed: Decides all that is drawn.
    """

    def __init__(self, indptr: Tensor, indices: Tensor, fanout: Sequence[int], seed: int) -> None:
        self.indptr, self.indices, self.fanout = indptr, indices, tuple(fanout)
        self._generator = torch.Generator().manual_seed(seed)
        # One more than the place of a node in the batch, 0 for none: fresh zeros take no memory
        # until a page of them is written.
        self._place = torch.zeros(len(indptr) - 1, dtype=torch.int32)

    def sample(self, seeds: Tensor) -> Batch:
        """Sample for seeds (int64, distinct), from the last layer down to the features."""
        nodes, adjacency = seeds, []
        self._place[seeds] = torch.arange(1, len(seeds) + 1, dtype=torch.int32)
        for fanout in self.fanout:
            offsets, neighbours = choose_neighbours(
                self.indptr, self.indices, nodes, fanout, self._generator
            )
            targets = len(nodes)
            fresh = neighbours[self._place[neighbours] == 0].unique()  # type: ignore[no-untyped-call]
            nodes = torch.cat([nodes, fresh])
            self._place[fresh] = torch.arange(targets + 1, len(nodes) + 1, dtype=torch.int32)
            column = self._place[neighbours].long() - 1
            adjacency.append(_matrix(offsets, column, len(nodes)))
        self._place[nodes] = 0
        return Batch(nodes, adjacency[::-1])


class PygLibSampler:
    """The same with pyg-lib, one of its hops a layer; arguments as for ``TorchSampler``.

    The seed is unused: pyg-lib takes no generator.
    """

    def __init__(self, indptr: Tensor, indices: Tensor, fanout: Sequence[int], _seed: int) -> None:
        from pyg_lib.sampler import neighbor_sample  # noqa: PLC0415 - not on PyPI

        self._neighbor_sample = neighbor_sample
        # pyg-lib wants one type for all.
        if len(indices) > torch.iinfo(indices.dtype).max:
            indices = indices.long()
        self.indptr, self.indices, self.fanout = indptr.to(indices.dtype), indices, tuple(fanout)

    def sample(self, seeds: Tensor) -> Batch:
        """Sample for seeds (int64, distinct), from the last layer down to the features."""
        nodes, adjacency = seeds.to(self.indices.dtype), []
        for fanout in self.fanout:
            targets = len(nodes)
            row, column, nodes, *_ = self._neighbor_sample(
                self.indptr, self.indices, nodes, [fanout], return_edge_id=False
            )
            offsets = torch.zeros(targets + 1, dtype=torch.int64)
            torch.cumsum(torch.bincount(row, minlength=targets), dim=0, out=offsets[1:])
            adjacency.append(_matrix(offsets, column.long(), len(nodes)))
        return Batch(nodes.long(), adjacency[::-1])


def sampler_class(name: str) -> type[TorchSampler | PygLibSampler]:
    """Choose a sampler: ``torch``, ``pyg-lib``, or ``auto`` for pyg-lib where it is installed.

    Raises:
        WorkloadError: pyg-lib is asked for and not installed.
    """
    installed = importlib.util.find_spec("pyg_lib") is not None
    if name == "pyg-lib" and not installed:
        msg = "--sampler pyg-lib, but pyg-lib is not installed; --sampler torch needs nothing more"
        raise WorkloadError(msg)
    return PygLibSampler if installed and name != "torch" else TorchSampler


def _matrix(offsets: Tensor, column: Tensor, sources: int) -> Tensor:
    return torch.sparse_csr_tensor(
        offsets,
        column,
        torch.ones(len(column)),
        size=(len(offsets) - 1, sources),
        check_invariants=False,  # they hold by construction, and checking takes time
    )
