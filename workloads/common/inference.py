"""Inference over all nodes of a graph, layer by layer, shared out over the ranks.

Every node's output of a layer is computed once, from all of its neighbours: no sampling, and no
neighbourhood computed again in every batch that touches it. Each rank computes a range of the
nodes. Between two layers the ranks exchange what the mean over neighbours is taken of, some columns
at a time, so that memory holds a rank's own outputs and a few columns of all nodes'.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor
    from torch_geometric.nn import SAGEConv

    from workloads.common.graph import Graph
    from workloads.common.ranks import Ranks

ROWS = 8192  # nodes at a time, so that what is made of the mapped features stays small
COLUMNS = 64  # exchanged at a time: a row of them is a few cache lines
_TABLES = itertools.count()  # all ranks make their tables in the same order


class Exchange:
    """Where all ranks put what they have of a table, a row for each node of the graph, and read it.

    Ranks on a CPU write to memory that all ranks of their machine share, and one rank of each
    machine sends it to the other machines. GPUs have a table each, and so have ranks that cannot
    share memory (in containers of their own, for instance): then every rank sends.

    Args:
        ranks: All of them make it together.
        num_rows: Rows of the table.
        shared: False for a table a rank on CPUs too.

    Attributes:
        mine: The range of the rows that this rank puts there.
    """

    def __init__(self, ranks: Ranks, num_rows: int, *, shared: bool = True) -> None:
        world = ranks.world
        self.num_rows, self.device = num_rows, ranks.device
        # A machine's rows are one range, in whatever order its ranks are numbered.
        machine = ranks.gather(world.node_rank)
        local = ranks.gather(world.local_rank)
        order = sorted(range(world.world_size), key=lambda rank: (machine[rank], local[rank]))
        share = -(-num_rows // world.world_size)
        starts = [min(place * share, num_rows) for place in range(world.world_size + 1)]
        place = order.index(world.rank)
        self.mine = range(starts[place], starts[place + 1])

        memory = None
        if shared and ranks.device.type == "cpu" and world.world_size > 1:
            memory = _shared_memory(ranks, num_rows * COLUMNS)
        if memory is None:
            memory = torch.empty(num_rows * COLUMNS, device=ranks.device)
            leaders = list(range(world.world_size))
        else:
            leaders = [rank for rank in order if local[rank] == 0]
        self._memory = memory
        self._group = None
        if len(leaders) == world.world_size > 1:
            self._group = dist.group.WORLD  # another would cost its connections again
        elif len(leaders) > 1:
            self._group = dist.new_group(leaders)
        # Who sends which rows; empty for a rank that takes no part in it.
        self._sent: list[tuple[int, slice]] = []
        if self._group is not None and world.rank in leaders:
            places = [order.index(rank) for rank in leaders]
            ends = [*places[1:], world.world_size]
            for rank, first, end in zip(leaders, places, ends, strict=True):
                rows = slice(starts[first], starts[end])
                if rows.start < rows.stop:
                    self._sent.append((rank, rows))

    def table(self, columns: int) -> Tensor:
        """The table, [rows, columns], float32; at most ``COLUMNS`` columns."""
        return self._memory[: self.num_rows * columns].view(self.num_rows, columns)

    def complete(self, table: Tensor) -> None:
        """Return once the rows of all ranks are in this rank's table."""
        self.wait()
        if self._group is not None:
            sending = [
                dist.broadcast(table[rows], rank, self._group, async_op=True)
                for rank, rows in self._sent
            ]
            for one in sending:
                one.wait()
            self.wait()

    def wait(self) -> None:
        """Return once all ranks have come this far, so that none overwrites what another reads."""
        dist.barrier()


def _shared_memory(ranks: Ranks, size: int) -> Tensor | None:
    """Return ``size`` float32 that the ranks of a machine share; None where some rank cannot.

    It is a file without a name, so nothing is left behind, and it needs no room in /dev/shm, which
    is 64 MB in many containers.
    """
    key = f"inference/{next(_TABLES)}/{ranks.world.node_rank}"
    memory, name, file, path = None, f"toolkit-{uuid.uuid4()}", -1, ""
    # torch raises RuntimeError where a file cannot be opened or mapped.
    if ranks.world.local_rank == 0:
        with contextlib.suppress(OSError, RuntimeError):
            file = os.memfd_create(name)
            memory = torch.from_file(f"/proc/self/fd/{file}", shared=True, size=size)
            path = f"/proc/{os.getpid()}/fd/{file}"
        ranks.store.set(key, f"{name} {path}")
    else:
        name, _, path = ranks.store.get(key).decode().partition(" ")
        with contextlib.suppress(OSError, RuntimeError):
            # The same number may be another process in this rank's own container.
            if path and name in str(Path(path).readlink()):
                memory = torch.from_file(path, shared=True, size=size)
    (missing,) = ranks.sum(memory is None)
    if file >= 0:
        os.close(file)
    return None if missing else memory


@torch.no_grad()
def infer(layers: Sequence[SAGEConv], graph: Graph, exchange: Exchange) -> Tensor:
    """Compute the last layer's outputs for the nodes of this rank; all ranks call it together.

    Args:
        layers: ``SAGEConv`` with the mean over neighbours, a ReLU between each two of them.
        graph: The mapped graph.
        exchange: For as many rows as the graph has nodes.

    Returns:
        [``exchange.mine``, classes], float32, on the device.
    """
    mine = exchange.mine
    x = torch.from_numpy(graph.x[mine.start : mine.stop])
    for i, layer in enumerate(layers):
        x = _layer(layer, x.relu_() if i else x, graph, exchange)
    return x


def _layer(layer: SAGEConv, x: Tensor, graph: Graph, exchange: Exchange) -> Tensor:
    mine, device = exchange.mine, exchange.device
    indptr, indices = torch.from_numpy(graph.indptr), torch.from_numpy(graph.indices)
    out = torch.empty(len(mine), layer.out_channels, device=device)
    for rows in _slices(len(mine), ROWS):
        out[rows] = functional.linear(
            x[rows].to(device).float(), layer.lin_r.weight, layer.lin_l.bias
        )
    for columns in _slices(layer.out_channels, COLUMNS):
        # The mean of the mapped neighbours is the neighbours' mean, mapped; and it is narrower.
        weight = layer.lin_l.weight[columns].T
        table = exchange.table(columns.stop - columns.start)
        own = table[mine.start : mine.stop]
        for rows in _slices(len(mine), ROWS):
            torch.mm(x[rows].to(device).float(), weight, out=own[rows])
        exchange.complete(table)
        for rows in _slices(len(mine), ROWS):
            offsets = indptr[mine.start + rows.start : mine.start + rows.stop + 1]
            first, last = int(offsets[0]), int(offsets[-1])
            neighbours = indices[first:last].to(device).long()
            starts = (offsets[:-1] - first).to(device)
            out[rows, columns] += functional.embedding_bag(neighbours, table, starts, mode="mean")
        exchange.wait()
    return out


def _slices(length: int, step: int) -> Iterator[slice]:
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))
