"""GraphSAGE with neighbour sampling under DistributedDataParallel.

    toolkit run --nodes 2 sage --epochs 4          # or any launcher that sets ranks:
    torchrun --nproc-per-node 4 -m workloads.sage --dataset planted

Every rank maps the same graph (one copy per node), samples the neighbourhood of its own share of
the training nodes, and averages gradients with the others: gloo between CPUs, NCCL between GPUs.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, TensorDataset
from torch_geometric.nn import SAGEConv

from workloads import datasets
from workloads.common.errors import WorkloadError
from workloads.common.metrics import Metrics, PeakPss
from workloads.common.options import (
    Parser,
    integers,
    natural,
    positive,
    positive_float,
    process_options,
    share,
)
from workloads.common.ranks import Ranks, process_group, run, same_weights
from workloads.common.sampler import sampler_class

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Sequence
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from toolkit.entrypoint import World
    from workloads.common.graph import Graph

REFERENCE_BATCH = 1024  # seeds a step, over all ranks, for which --lr is meant


class Inputs(NamedTuple):
    """What a model computes a batch's seeds from.

    Attributes:
        x: [targets, features], float32: the features of the first layer's targets.
        mean: [targets, features], float32: the mean features of their sampled neighbours.
        adjacency: One matrix for each layer after the first; as in ``sampler.Batch``.
    """

    x: Tensor
    mean: Tensor
    adjacency: list[Tensor]


class SAGE(nn.Module):
    """One ``SAGEConv`` a layer, each computed only for the nodes that the next layer reads."""

    def __init__(self, widths: list[int], dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SAGEConv(a, b) for a, b in pairwise(widths))
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: Inputs) -> Tensor:
        """Classify the seeds."""
        # The first layer's mean over the neighbours comes with the batch: nothing in it is learnt.
        first: SAGEConv = self.layers[0]
        x: Tensor = first.lin_l(inputs.mean) + first.lin_r(inputs.x)
        for layer, matrix in zip(self.layers[1:], inputs.adjacency, strict=True):
            x = self.dropout(functional.relu(x))
            # The mean over the neighbours is one product with a sparse matrix, before the linear
            # map. The targets are the first of the sources.
            x = layer((x, x[: matrix.size(0)]), matrix)
        return x


class MLP(nn.Module):
    """The baseline: as many layers, as wide, and no edges."""

    def __init__(self, widths: list[int], dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: Inputs) -> Tensor:
        """Classify the seeds from their own features."""
        x = inputs.x
        for i, layer in enumerate(self.layers):
            if i > 0:
                x = self.dropout(functional.relu(x))
            x = layer(x)
        return x


class Batches:
    """Turns seeds into what the model takes, and their labels."""

    def __init__(
        self, graph: Graph, options: argparse.Namespace, device: torch.device, seed: int
    ) -> None:
        self.x, self.y, self.device = torch.from_numpy(graph.x), torch.from_numpy(graph.y), device
        # Averaging needs no copy of the neighbours' features where they can be read as they are.
        self.reads_map = device.type == "cpu" and self.x.dtype == torch.float32
        self.sampler = sampler_class(options.sampler)(
            torch.from_numpy(graph.indptr),
            torch.from_numpy(graph.indices),
            options.fanout if options.model == "sage" else (),
            seed,
        )

    def ahead(self, parts: Iterable[Tensor]) -> Iterator[tuple[Inputs, Tensor]]:
        """Load the batch of each part in turn, in a thread, while the one before it is used."""
        with ThreadPoolExecutor(1) as thread:
            waiting: deque[Future[tuple[Inputs, Tensor]]] = deque()
            for part in parts:
                waiting.append(thread.submit(self.load, part))
                if len(waiting) == 2:
                    yield waiting.popleft().result()
            yield waiting.popleft().result()

    def load(self, seeds: Tensor) -> tuple[Inputs, Tensor]:
        """Sample around ``seeds`` (int64) and bring the batch to the device."""
        batch = self.sampler.sample(seeds)
        y = self.y[seeds].to(self.device).long()
        if not batch.adjacency:
            x = self._features(batch.nodes)
            return Inputs(x, x[:0], []), y
        first, *others = batch.adjacency
        columns, targets = first.col_indices(), first.size(0)
        if self.reads_map:
            features, columns = self.x, batch.nodes[columns]
            x = features[batch.nodes[:targets]]
        else:
            features, columns = self._features(batch.nodes), columns.to(self.device)
            x = features[:targets]
        offsets = first.crow_indices()[:-1].to(self.device)
        mean = functional.embedding_bag(columns, features, offsets, mode="mean")
        return Inputs(x, mean, [matrix.to(self.device) for matrix in others]), y

    def _features(self, nodes: Tensor) -> Tensor:
        return self.x[nodes].to(self.device).float()


def train(ranks: Ranks, graph: Graph, options: argparse.Namespace, metrics: Metrics) -> None:
    """Train, evaluate and report; every rank runs this on its share of the nodes."""
    world, device = ranks.world, ranks.device
    batches = Batches(graph, options, device, options.seed + world.rank)

    torch.manual_seed(options.seed)
    widths = [graph.num_features, *[options.hidden] * (len(options.fanout) - 1), graph.num_classes]
    model = {"sage": SAGE, "mlp": MLP}[options.model](widths, options.dropout).to(device)
    ddp = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    # All ranks have rank 0's weights now. From here on each draws its own numbers: one seed for
    # all would repeat the same dropout masks on every rank.
    torch.manual_seed(options.seed + world.rank)

    train_nodes = torch.from_numpy(graph.train).long()
    # drop_last: all ranks take the same number of steps, for one that took a step more would wait
    # for the others for ever. It costs at most world_size - 1 nodes, others each epoch.
    share_of_rank: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(
        TensorDataset(train_nodes),
        world.world_size,
        world.rank,
        seed=options.seed,
        drop_last=True,
    )
    steps = math.ceil(len(share_of_rank) / options.batch_size)
    global_batch = min(options.batch_size, len(share_of_rank)) * world.world_size
    # Adam's rate goes with the root of the batch (Malladi et al., 2022). It rises over the first
    # epoch and falls to nothing over all of them.
    rate = options.lr * math.sqrt(global_batch / REFERENCE_BATCH)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min(1, (n + 1) / steps) * (1 - n / (steps * options.epochs))
    )
    dropped = len(train_nodes) - len(share_of_rank) * world.world_size
    metrics.say(
        f"{options.model} on {options.dataset}: {graph.num_nodes} nodes, {graph.num_edges} edges, "
        f"{graph.num_features} features, {graph.num_classes} classes"
    )
    metrics.say(
        f"world size {world.world_size} on {world.num_nodes} node(s), {device.type}, "
        f"sampler {type(batches.sampler).__name__}"
    )
    metrics.say(
        f"{steps} steps an epoch of {global_batch} seeds over all ranks, learning rate {rate:.2g}; "
        f"{dropped} of {len(train_nodes)} training nodes dropped an epoch to keep the steps equal"
    )

    losses, peak_pss = [], PeakPss(ranks)
    for epoch in range(1, options.epochs + 1):
        model.train()
        share_of_rank.set_epoch(epoch)
        started, loss_sum, correct = time.monotonic(), 0.0, 0
        seeds_of_epoch = train_nodes[list(share_of_rank)]
        parts = torch.split(seeds_of_epoch, options.batch_size)
        for step, (inputs, y) in enumerate(batches.ahead(parts), 1):
            logits = ddp(inputs)
            loss = functional.cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()

            loss_sum += loss.item() * len(y)
            correct += int((logits.argmax(dim=1) == y).sum())
            done = min(step * options.batch_size, len(seeds_of_epoch)) * world.world_size
            speed = round(done / (time.monotonic() - started), 1)
            if metrics.due():
                metrics.write(
                    epoch=epoch,
                    epochs=options.epochs,
                    step=step,
                    steps=steps,
                    loss=loss.item(),
                    seeds_per_second=speed,
                )

        total, hits, count = ranks.sum(loss_sum, correct, len(seeds_of_epoch))
        losses.append(total / count)
        epoch_metrics = {
            "epoch": epoch,
            "epochs": options.epochs,
            "loss": losses[-1],
            "train_accuracy": hits / count,
            "val_accuracy": evaluate(model, batches, graph.val, ranks, options.batch_size),
            "seeds_per_second": speed,
        }
        peak_pss.measure()
        metrics.write(**epoch_metrics)
        metrics.say(
            f"epoch {epoch}/{options.epochs}: loss {losses[-1]:.4f}, "
            f"train accuracy {epoch_metrics['train_accuracy']:.4f}, "
            f"val accuracy {epoch_metrics['val_accuracy']:.4f}, {speed:.0f} seeds/s"
        )

    test_accuracy = evaluate(model, batches, graph.test, ranks, options.batch_size)
    digest = same_weights(ranks, model)
    metrics.say(f"test accuracy {test_accuracy:.4f}; all ranks hold the weights {digest[:12]}")
    metrics.write(
        **epoch_metrics,
        losses=losses,
        test_accuracy=test_accuracy,
        peak_pss_mb_per_node=peak_pss.per_node,
        weights_sha256=digest,
        world_size=world.world_size,
        device=device.type,
        dataset=options.dataset,
        model=options.model,
    )


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Batches, nodes: NDArray[Any], ranks: Ranks, batch_size: int
) -> float:
    """Return the accuracy over ``nodes``: every rank counts its share, and none is left out."""
    model.eval()
    mine = torch.from_numpy(nodes[ranks.world.rank :: ranks.world.world_size]).long()
    correct = 0
    for inputs, y in batches.ahead(torch.split(mine, 4 * batch_size)):
        correct += int((model(inputs).argmax(dim=1) == y).sum())
    hits, count = ranks.sum(correct, len(mine))
    return hits / count


def main(world: World) -> None:
    """Read the options, get the graph, train."""
    options = parse()
    recipe = datasets.recipe(options)
    sampler_class(options.sampler)
    with process_group(world, options.device, timedelta(seconds=options.timeout)) as ranks:
        graph = datasets.load(ranks, recipe, options)
        if world.world_size > len(graph.train):
            raise WorkloadError(
                f"world size {world.world_size}, but {options.dataset} has {len(graph.train)} "
                f"training nodes: take fewer ranks, or a larger data set"
            )
        metrics = Metrics(os.environ, world.rank)
        train(ranks, graph, options, metrics)
        metrics.close()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the options, from the command line unless they are given.

    Raises:
        WorkloadError: One of them is wrong.
    """
    parser = Parser("sage", "Train GraphSAGE with neighbour sampling under DDP.")
    add = parser.add_argument_group("training").add_argument
    add("--model", choices=("sage", "mlp"), default="sage", help="mlp: the same without edges")
    add("--epochs", type=positive, default=8)
    add("--batch-size", type=positive, default=256, help="seeds a step on each rank (256)")
    add("--fanout", type=integers, default=(10, 10), metavar="N,N", help="one a layer (10,10)")
    add("--hidden", type=positive, default=256, help="width of the layers between (256)")
    add(
        "--lr",
        type=positive_float,
        default=6e-3,
        help=f"Adam's rate for {REFERENCE_BATCH} seeds over all ranks (0.006); it is multiplied "
        f"by the root of the seeds over all ranks / {REFERENCE_BATCH}",
    )
    add("--dropout", type=share, default=0.5, help="0 to below 1 (0.5)")
    add("--seed", type=natural, default=0)
    add("--sampler", choices=("auto", "torch", "pyg-lib"), default="auto")
    add = parser.add_argument_group("data").add_argument
    add("--dataset", choices=datasets.NAMES, default="debian")
    add(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help="where prepared data is kept, node-local or shared "
        "($TOOLKIT_DATA, else ~/.cache/toolkit, else a temporary folder)",
    )
    add(
        "--data-timeout",
        type=positive_float,
        default=600,
        metavar="SECONDS",
        help="how long a rank waits for another one that prepares the data (600)",
    )
    add = parser.add_argument_group("the size of --dataset planted").add_argument
    add("--num-nodes", type=positive, default=200_000)
    add("--num-edges", type=positive, default=20_000_000)
    add("--num-features", type=positive, default=602)
    add("--num-classes", type=positive, default=32)
    add("--data-seed", type=natural, default=0)
    process_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(run("sage", main))
