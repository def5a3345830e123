"""Parts of a step in one process, with and without each speed-up; called by ``suite``.

Prints a line of JSON: the times of ``ROUNDS`` rounds in which all variants take turns, so that a
busy machine slows them alike.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
warnings.simplefilter("ignore")

import torch  # noqa: E402 - the path comes first
import torch_geometric.typing  # noqa: E402
from rank import BATCH, DROPOUT, FANOUT, HIDDEN, tutorial_data  # noqa: E402
from torch.nn import functional  # noqa: E402

from workloads import sage  # noqa: E402
from workloads.common.graph import open_graph  # noqa: E402
from workloads.common.sampler import TorchSampler  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from workloads.common.graph import Graph
    from workloads.common.sampler import PygLibSampler

ROUNDS = 5
BLOCK = 8  # steps of a round


class Step:
    """Training steps in this process."""

    def __init__(self, graph: Graph) -> None:
        options = sage.parse(["--sampler", "torch", "--fanout", ",".join(map(str, FANOUT))])
        self.batches = sage.Batches(graph, options, torch.device("cpu"), 0)
        self.model = sage.SAGE([graph.num_features, HIDDEN, graph.num_classes], DROPOUT)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)

    def learn(self, out: Tensor, y: Tensor) -> None:
        """Finish a step."""
        self.optimizer.zero_grad()
        functional.cross_entropy(out, y).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def ahead(self, parts: Sequence[Tensor]) -> None:
        """As ``sage`` does it: the next batch is prepared in a thread."""
        for inputs, y in self.batches.ahead(parts):
            self.learn(self.model(inputs), y)

    def in_turn(self, parts: Sequence[Tensor]) -> None:
        """Without the thread."""
        for part in parts:
            inputs, y = self.batches.load(part)
            self.learn(self.model(inputs), y)

    def gathered(self, parts: Sequence[Tensor]) -> None:
        """Without the thread and the fused mean: all features copied, then multiplied by CSR."""
        first, second = self.model.layers
        for part in parts:
            batch = self.batches.sampler.sample(part)
            x = self.batches.x[batch.nodes]
            near, far = batch.adjacency[1], batch.adjacency[0]
            hidden = self.model.dropout(first((x, x[: far.size(0)]), far).relu())
            self.learn(second((hidden, hidden[: near.size(0)]), near), self.batches.y[part].long())


def sample(sampler: TorchSampler | PygLibSampler, parts: Sequence[Tensor]) -> None:
    """Sampling alone."""
    for part in parts:
        sampler.sample(part)


def main() -> None:
    """Measure and print."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    graph = open_graph(folder)
    step = Step(graph)
    sampler = step.batches.sampler
    int64 = TorchSampler(sampler.indptr, sampler.indices.long(), FANOUT, 0)
    nodes = torch.from_numpy(graph.train).long()
    order = torch.randperm(len(nodes), generator=torch.Generator().manual_seed(1))
    parts = nodes[order].split(BATCH)  # type: ignore[no-untyped-call]
    ways: dict[str, Callable[[Sequence[Tensor]], None]] = {
        "sampling": partial(sample, sampler),
        "sampling_int64": partial(sample, int64),
        "ahead": step.ahead,
        "in_turn": step.in_turn,
        "gathered": step.gathered,
    }
    if torch_geometric.typing.WITH_TORCH_SPARSE:
        ways["torch_sparse"] = torch_sparse_sampling(folder)
    wall: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():  # once unmeasured
        way(parts[:1])
    for number in range(ROUNDS):
        block = parts[number * BLOCK : (number + 1) * BLOCK]
        # Every other round in reverse, so that none always finds what another has just read.
        for name, way in list(ways.items())[:: 1 - 2 * (number % 2)]:
            began, used = time.perf_counter(), time.process_time()
            way(block)
            wall[name].append((time.perf_counter() - began) / BLOCK)
            cpu[name].append((time.process_time() - used) / BLOCK)
    print(json.dumps({"wall": wall, "cpu": cpu}))


def torch_sparse_sampling(folder: Path) -> Callable[[Sequence[Tensor]], None]:
    """Sampling as ``NeighborLoader`` does it, without the features."""
    from torch_geometric.sampler import NeighborSampler, NodeSamplerInput  # noqa: PLC0415

    sampler = NeighborSampler(tutorial_data(folder), list(FANOUT))

    def sample(parts: Sequence[Tensor]) -> None:
        for part in parts:
            sampler.sample_from_nodes(NodeSamplerInput(None, part))

    return sample


if __name__ == "__main__":
    main()
