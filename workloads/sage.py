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
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, TensorDataset
from torch_geometric.nn import SAGEConv

from workloads import datasets
from workloads.common.errors import WorkloadError
from workloads.common.feature_cache import FeatureCache, hottest, times_read, to_device
from workloads.common.inference import Exchange, infer
from workloads.common.metrics import Metrics, PeakPss, Waiting, give_back
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
        """Compute the logits of the seeds."""
        # The first layer's mean over the neighbours comes with the batch: nothing in it is learnt.
        first: SAGEConv = self.layers[0]
        x: Tensor = torch.addmm(first.lin_l(inputs.mean), inputs.x, first.lin_r.weight.T)
        for layer, matrix in zip(self.layers[1:], inputs.adjacency, strict=True):
            x = self.dropout(functional.relu(x, inplace=True))
            # The mean over the neighbours is one product with a sparse matrix, before the linear
            # map, in float32: torch has no other. The targets are the first of the sources.
            x = x.float()
            x = layer((x, x[: matrix.size(0)]), matrix)
        return x

    def infer(self, graph: Graph, exchange: Exchange) -> Tensor:
        """Compute the logits of this rank's nodes, from all of their neighbours."""
        return infer(list(self.layers), graph, exchange)


class MLP(nn.Module):
    """The baseline: as many layers, as wide, and no edges."""

    def __init__(self, widths: list[int], dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: Inputs) -> Tensor:
        """Compute the logits of the seeds from their own features."""
        return self._classify(inputs.x)

    def infer(self, graph: Graph, exchange: Exchange) -> Tensor:
        """Compute the logits of this rank's nodes."""
        own = torch.from_numpy(graph.x[exchange.mine.start : exchange.mine.stop])
        return self._classify(own.to(exchange.device).float())

    def _classify(self, x: Tensor) -> Tensor:
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
        self.sampler = sampler_class(options.sampler)(
            torch.from_numpy(graph.indptr),
            torch.from_numpy(graph.indices),
            options.fanout if options.model == "sage" else (),
            seed,
        )
        self.cache = None
        if options.feature_cache:
            count = times_read(torch.from_numpy(graph.indices), graph.num_nodes)
            row_bytes = self.x.element_size() * graph.num_features
            hot = hottest(count, row_bytes, options.feature_cache * 10**6)
            self.cache = FeatureCache(self.x, hot, device)
        # What is done on a GPU to load a batch has a queue of its own there, beside the model's.
        self._stream = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def ahead(self, parts: Iterable[Tensor]) -> Iterator[tuple[Inputs, Tensor]]:
        """Load the batch of each part in turn, in a thread, while the one before it is used."""
        with ThreadPoolExecutor(1) as thread:
            waiting: deque[Future[tuple[Inputs, Tensor]]] = deque()
            for part in parts:
                waiting.append(thread.submit(self._load_beside, part))
                if len(waiting) == 2:
                    yield waiting.popleft().result()
            yield waiting.popleft().result()

    def _load_beside(self, seeds: Tensor) -> tuple[Inputs, Tensor]:
        if self._stream is None:
            return self.load(seeds)
        with torch.cuda.stream(self._stream):
            inputs, y = self.load(seeds)
        self._stream.synchronize()  # this thread waits, the model goes on
        # Else the next batch could be given this one's memory while the model still reads it.
        model = torch.cuda.default_stream(self.device)
        matrices = [(m.crow_indices(), m.col_indices(), m.values()) for m in inputs.adjacency]
        for tensor in (inputs.x, inputs.mean, y, *chain(*matrices)):
            tensor.record_stream(model)
        return inputs, y

    def load(self, seeds: Tensor) -> tuple[Inputs, Tensor]:
        """Sample around ``seeds`` (int64) and bring the batch to the device."""
        batch, y = self.sampler.sample(seeds), to_device(self.y[seeds].long(), self.device)
        nodes = batch.nodes
        if not batch.adjacency:
            x = self._features(nodes)
            return Inputs(x, x[:0], []), y
        first, *others = batch.adjacency
        offsets, columns, targets = first.crow_indices()[:-1], first.col_indices(), first.size(0)
        if self.cache or self.x.dtype != torch.float32:
            offsets, columns = to_device(offsets, self.device), to_device(columns, self.device)
            features = self._features(nodes)
            mean = functional.embedding_bag(columns, features, offsets, mode="mean")
            x = features[:targets]
        else:
            # Averaging needs no copy of the neighbours' features where they can be read as they
            # are, and what goes to a GPU is their mean instead of all of them.
            mean = functional.embedding_bag(nodes[columns], self.x, offsets, mode="mean")
            mean, x = to_device(mean, self.device), to_device(self.x[nodes[:targets]], self.device)
        return Inputs(x, mean, [matrix.to(self.device) for matrix in others]), y

    def _features(self, nodes: Tensor) -> Tensor:
        if self.cache:
            return self.cache.gather(nodes).float()
        return to_device(self.x[nodes], self.device).float()


def train(ranks: Ranks, graph: Graph, options: argparse.Namespace, metrics: Metrics) -> None:
    """Train, evaluate and report; every rank runs this on its share of the nodes."""
    world, device = ranks.world, ranks.device
    batches = Batches(graph, options, device, options.seed + world.rank)

    torch.manual_seed(options.seed)
    widths = [graph.num_features, *[options.hidden] * (len(options.fanout) - 1), graph.num_classes]
    model = (SAGE if options.model == "sage" else MLP)(widths, options.dropout).to(device)
    ddp = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    # The numbers of nodes and edges are other ones in every batch.
    forward = torch.compile(ddp, dynamic=True) if options.compile else ddp
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

    losses, peak_pss, exchange = [], PeakPss(ranks), Exchange(ranks, graph.num_nodes)
    for epoch in range(1, options.epochs + 1):
        model.train()
        share_of_rank.set_epoch(epoch)
        started, loss_sum, correct = time.monotonic(), 0.0, 0
        seeds_of_epoch = train_nodes[list(share_of_rank)]
        loaded = Waiting(batches.ahead(torch.split(seeds_of_epoch, options.batch_size)))
        for step, (inputs, y) in enumerate(loaded, 1):
            with torch.autocast(device.type, torch.bfloat16, enabled=options.bf16):
                logits = forward(inputs)
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
        peak_pss.measure()
        val_accuracy, test_accuracy = evaluate(model, graph, ranks, exchange)
        epoch_metrics = {
            "epoch": epoch,
            "epochs": options.epochs,
            "loss": losses[-1],
            "train_accuracy": hits / count,
            "val_accuracy": val_accuracy,
            "seeds_per_second": speed,
            "data_wait_share": round(loaded.share, 3),
        }
        peak_pss.measure()
        metrics.write(**epoch_metrics)
        metrics.say(
            f"epoch {epoch}/{options.epochs}: loss {losses[-1]:.4f}, "
            f"train accuracy {epoch_metrics['train_accuracy']:.4f}, "
            f"val accuracy {epoch_metrics['val_accuracy']:.4f}, {speed:.0f} seeds/s"
        )

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
    model: SAGE | MLP, graph: Graph, ranks: Ranks, exchange: Exchange
) -> tuple[float, float]:
    """Return the accuracy over the validation and the test nodes, without sampling.

    Every rank counts those among its own nodes, so that none is left out or counted twice.
    """
    give_back()
    model.eval()
    mine = exchange.mine
    classes = model.infer(graph, exchange).argmax(dim=1).cpu().numpy()
    right = classes == graph.y[mine.start : mine.stop]
    counts = []
    for nodes in (graph.val, graph.test):
        own = nodes[(nodes >= mine.start) & (nodes < mine.stop)] - mine.start
        counts += [int(right[own].sum()), len(own)]
    val_hits, val_count, test_hits, test_count = ranks.sum(*counts)
    return val_hits / val_count, test_hits / test_count


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
    add = parser.add_argument_group("for GPUs; off, since their gain is not measured").add_argument
    add(
        "--feature-cache",
        type=natural,
        default=0,
        metavar="MB",
        help="keep the features of the nodes that are read most on the device (0: none)",
    )
    add("--bf16", action="store_true", help="compute in bfloat16, keep the weights in float32")
    add("--compile", action="store_true", help="torch.compile the model")
    process_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(run("sage", main))
