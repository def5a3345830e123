"""One rank of a measured training run: the way of the toolkit's sage, or the way of the tutorial.

Started by ``suite`` with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set. Both ways train the
same model from the same weights on the same seeds in the same order, and are timed by the same
loop. Rank 0 prints a line of JSON.

The tutorial's way is that of PyG's multi-GPU examples, written anew: every rank loads the graph as
COO edges of int64, takes its part of the training nodes, samples with ``NeighborLoader``, and
computes every layer for every node of the batch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
warnings.simplefilter("ignore")

import numpy as np  # noqa: E402 - the path comes first
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch_geometric.data import Data  # noqa: E402
from torch_geometric.loader import NeighborLoader  # noqa: E402
from torch_geometric.nn import SAGEConv  # noqa: E402

from toolkit.entrypoint import resolve  # noqa: E402
from workloads import sage  # noqa: E402
from workloads.common.graph import Graph, open_graph  # noqa: E402
from workloads.common.inference import Exchange  # noqa: E402
from workloads.common.metrics import give_back, pss_mb  # noqa: E402
from workloads.common.ranks import Ranks  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

FANOUT, BATCH, HIDDEN, RATE, DROPOUT = (25, 10), 1024, 256, 3e-3, 0.5
EVALUATIONS = 3


class TutorialSAGE(nn.Module):
    """Two layers over the whole sampled subgraph."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([SAGEConv(features, HIDDEN), SAGEConv(HIDDEN, classes)])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Classify all nodes of the subgraph."""
        first, second = self.layers
        x = functional.dropout(first(x, edge_index).relu(), DROPOUT, training=self.training)
        out: Tensor = second(x, edge_index)
        return out


def tutorial_data(folder: Path) -> Data:
    """Load the graph as a tutorial's data set has it: COO edges, all of it in this process."""
    graph = open_graph(folder, private=True)
    target = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr))
    edges = torch.from_numpy(np.stack([graph.indices.astype(np.int64), target]))
    return Data(x=torch.from_numpy(graph.x), edge_index=edges, y=torch.from_numpy(graph.y).long())


class Tutorial:
    """The way of the tutorial."""

    def __init__(self, folder: Path, seeds: Tensor, rank: int) -> None:
        data = tutorial_data(folder)
        torch.manual_seed(0)
        self.model: nn.Module = TutorialSAGE(data.num_features, int(data.y.max()) + 1)
        self.ddp = DistributedDataParallel(self.model)
        torch.manual_seed(rank)
        self.loader = NeighborLoader(
            data, num_neighbors=list(FANOUT), input_nodes=seeds, batch_size=BATCH, shuffle=False
        )

    def losses(self) -> Iterator[Tensor]:
        """The loss of each batch."""
        for batch in self.loader:
            out = self.ddp(batch.x, batch.edge_index)[: batch.batch_size]
            yield functional.cross_entropy(out, batch.y[: batch.batch_size])


class Toolkit:
    """The way of ``workloads/sage.py``."""

    def __init__(self, folder: Path, seeds: Tensor, rank: int) -> None:
        self.graph: Graph = open_graph(folder)
        torch.manual_seed(0)
        widths = [self.graph.num_features, HIDDEN, self.graph.num_classes]
        self.model: nn.Module = sage.SAGE(widths, DROPOUT)
        self.ddp = DistributedDataParallel(self.model)
        torch.manual_seed(rank)
        options = sage.parse(["--sampler", "torch", "--fanout", ",".join(map(str, FANOUT))])
        self.batches = sage.Batches(self.graph, options, torch.device("cpu"), rank)
        self.seeds = seeds

    def losses(self) -> Iterator[Tensor]:
        """The loss of each batch."""
        for inputs, y in self.batches.ahead(self.seeds.split(BATCH)):  # type: ignore[no-untyped-call]
            yield functional.cross_entropy(self.ddp(inputs), y)


def train(way: Tutorial | Toolkit) -> dict[str, Any]:
    """Train a step a batch; the first one, which pays for what is done once, is not timed."""
    optimizer = torch.optim.Adam(way.ddp.parameters(), lr=RATE)
    losses: list[float] = []
    begun = cpu = 0.0
    for loss in way.losses():
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
        if len(losses) == 1:
            begun, cpu = time.perf_counter(), time.process_time()
    steps = len(losses) - 1
    took = torch.tensor([time.perf_counter() - begun, time.process_time() - cpu]) / max(1, steps)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    mean = torch.tensor(losses) / dist.get_world_size()
    dist.all_reduce(mean)
    # What the allocator keeps for later counts for neither way.
    give_back()
    dist.barrier()
    pss = torch.tensor([pss_mb()])  # while all ranks hold what they hold
    dist.all_reduce(pss)
    return {
        "step_s": took[0].item(),
        "step_cpu_s": took[1].item(),
        "losses": mean.tolist(),
        "pss_mb": pss.item(),
    }


def evaluate(folder: Path, *, shared: bool) -> dict[str, Any]:
    """Time the evaluation of ``sage`` on all ranks that there are; the first round is not timed."""
    ranks = Ranks(
        resolve(os.environ),
        torch.device("cpu"),
        dist.distributed_c10d._get_default_store(),  # noqa: SLF001 - torch has no other way to it
    )
    graph = open_graph(folder)
    torch.manual_seed(0)
    model = sage.SAGE([graph.num_features, HIDDEN, graph.num_classes], DROPOUT)
    exchange = Exchange(ranks, graph.num_nodes, shared=shared)
    times = []
    for _ in range(EVALUATIONS + 1):
        dist.barrier()
        begun = time.perf_counter()
        sage.evaluate(model, graph, ranks, exchange)
        times.append(time.perf_counter() - begun)
    dist.barrier()
    return {"evaluation_s": float(np.median(times[1:]))}


def main() -> None:
    """Be a rank."""
    parser = argparse.ArgumentParser()
    ways = ("tutorial", "toolkit", "evaluate", "evaluate-private")
    parser.add_argument("way", choices=ways)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if options.way.startswith("evaluate"):
        result = evaluate(options.folder, shared=options.way == "evaluate")
    else:
        nodes = torch.from_numpy(np.load(options.folder / "train.npy")).long()
        shuffled = nodes[torch.randperm(len(nodes), generator=torch.Generator().manual_seed(0))]
        seeds = shuffled[rank::world_size][: (options.steps + 1) * BATCH]
        start: type[Tutorial | Toolkit] = Tutorial if options.way == "tutorial" else Toolkit
        result = train(start(options.folder, seeds, rank))
    if rank == 0:
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
