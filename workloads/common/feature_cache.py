"""Features of the nodes that are read most, kept on the device; the rest comes from the map.

A few hubs are the neighbours of many: on a graph with a heavy tail, a device that holds a tenth of
the nodes finds most of what a batch reads. Off until it is asked for (``--feature-cache``).
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 1 << 24  # edges counted at a time


def times_read(indices: Tensor, num_nodes: int) -> Tensor:
    """How many nodes have each node as a neighbour: [nodes], int64.

    That, and not how many neighbours a node has itself, is how often sampling comes by it.

    Args:
        indices: [edges], any integer: the neighbours of all nodes; may be a mapped file.
        num_nodes: How many nodes there are.
    """
    count = torch.zeros(num_nodes, dtype=torch.int64)
    for part in indices.split(CHUNK):  # type: ignore[no-untyped-call]
        count += torch.bincount(part, minlength=num_nodes)
    return count


def hottest(count: Tensor, row_bytes: int, budget: int) -> Tensor:
    """The nodes that are read most, as many as fit: int64, ascending; none that nobody reads.

    Args:
        count: [nodes]: from ``times_read``.
        row_bytes: What one node's features take.
        budget: Bytes that may be used.
    """
    many = min(budget // row_bytes, int((count > 0).sum()))
    return count.topk(many).indices.sort().values


class FeatureCache:
    """Reads rows of ``x``, those of some nodes from the device.

    Args:
        x: [nodes, features]: all features; may be a mapped file.
        nodes: The nodes whose rows are kept: int64, distinct.
        device: Where they are kept, and where rows are wanted.
    """

    def __init__(self, x: Tensor, nodes: Tensor, device: torch.device) -> None:
        self.x, self.device = x, device
        self._rows = x[nodes].to(device)
        # One more than the place of a node among the rows, 0 for none: fresh zeros take no memory
        # until a page of them is written.
        self._place = torch.zeros(len(x), dtype=torch.int32)
        self._place[nodes] = torch.arange(1, len(nodes) + 1, dtype=torch.int32)

    def gather(self, nodes: Tensor) -> Tensor:
        """The rows of ``nodes`` (int64, on the CPU), on the device and in the type of ``x``."""
        place = self._place[nodes]
        found = torch.empty(len(nodes), self.x.size(1), dtype=self.x.dtype, device=self.device)
        hot, cold = (place > 0).nonzero().squeeze(1), (place == 0).nonzero().squeeze(1)
        kept = to_device(place[hot].long() - 1, self.device)
        found[to_device(hot, self.device)] = self._rows[kept]
        found[to_device(cold, self.device)] = to_device(self.x[nodes[cold]], self.device)
        return found


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the CPU; to a GPU from pinned memory, while the CPU goes on.

    What the GPU does next in the same stream waits for the copy, and torch keeps the pinned memory
    until it is done.
    """
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
