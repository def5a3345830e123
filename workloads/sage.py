"""GraphSAGE with neighbour sampling under DistributedDataParallel.

    toolkit run --nodes 2 sage --epochs 4          # or any launcher that sets ranks:
    torchrun --nproc-per-node 4 -m workloads.sage --dataset planted

Every rank maps the same graph (one copy per node), samples the neighbourhood of its own share of
the training nodes, and averages gradients with the others: gloo between CPUs, NCCL between GPUs.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from torch_geometric.nn import SAGEConv

from workloads import datasets
from workloads.common.errors import WorkloadError
from workloads.common.graph import Graph, open_graph
from workloads.common.metrics import Metrics, pss_mb
from workloads.common.options import Parser, integers, positive
from workloads.common.prepare import default_root, prepare, wait_for
from workloads.common.ranks import Ranks, as_indices, process_group, run, same_weights
from workloads.common.sampler import Batch, NeighbourSampler

if TYPE_CHECKING:
    from toolkit.entrypoint import World

REFERENCE_BATCH = 1024  # seeds a step over all ranks for which --lr is meant

# torch warns once a process that sparse CSR tensors are young.
warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")


class SAGE(nn.Module):
    """One ``SAGEConv`` a layer, each computed only for the nodes that the next layer reads."""

    def __init__(self, widths: list[int], dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SAGEConv(a, b) for a, b in zip(widths, widths[1:], strict=False))
        self.dropout = dropout

    def forward(self, x: Tensor, adjacency: list[Tensor]) -> Tensor:
        """Classify the seeds from the features of all nodes of a batch."""
        for i, (layer, matrix) in enumerate(zip(self.layers, adjacency, strict=True)):
            if i:
                x = F.dropout(F.relu(x), self.dropout, self.training)
            x = layer((x, x[: matrix.size(0)]), matrix)
        return x


class MLP(nn.Module):
    """The baseline: the same widths, and no edges."""

    def __init__(self, widths: list[int], dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False))
        self.dropout = dropout

    def forward(self, x: Tensor, _adjacency: list[Tensor]) -> Tensor:
        """Classify the seeds from their own features."""
        for i, layer in enumerate(self.layers):
            if i:
                x = F.dropout(F.relu(x), self.dropout, self.training)
            x = layer(x)
        return x


def train(ranks: Ranks, graph: Graph, options: argparse.Namespace, metrics: Metrics) -> None:
    """Train, evaluate and report; the same on every rank."""
    world, device = ranks.world, ranks.device
    say = print if world.rank == 0 else _silent

    features = torch.from_numpy(graph.x)
    labels = torch.from_numpy(graph.y)
    fanout = options.fanout if options.model == "sage" else ()
    sampler = NeighbourSampler(
        torch.from_numpy(graph.indptr),
        torch.from_numpy(graph.indices),
        fanout,
        seed=options.seed + world.rank,
    )

    def load(seeds: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
        batch: Batch = sampler.sample(seeds)
        x = features[batch.nodes].to(device).float()
        return x, [matrix.to(device) for matrix in batch.adjacency], labels[seeds].to(device).long()

    torch.manual_seed(options.seed)
    widths = [graph.num_features, *[options.hidden] * (len(options.fanout) - 1), graph.num_classes]
    model = {"sage": SAGE, "mlp": MLP}[options.model](widths, options.dropout).to(device)
    ddp = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    # DDP gave all ranks the weights of rank 0; from here on each has its own dropout.
    torch.manual_seed(options.seed + world.rank)

    # Drops at most world_size - 1 training nodes an epoch, others each time, so that all ranks
    # take the same number of steps: one more step on one rank would wait for the others forever.
    training = as_indices(graph.train)
    shares = DistributedSampler(
        range(len(training)), world.world_size, world.rank, seed=options.seed, drop_last=True
    )
    steps = -(-len(shares) // options.batch_size)
    # Adam's rate grows with the root of the batch (Malladi et al., 2022). It rises over the first
    # epoch and falls to zero over all of them.
    global_batch = min(options.batch_size, len(shares)) * world.world_size
    rate = options.lr * (global_batch / REFERENCE_BATCH) ** 0.5
    optimizer = torch.optim.Adam(ddp.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min(1, (n + 1) / steps) * (1 - n / (steps * options.epochs))
    )
    say(
        f"{options.model} on {options.dataset}: {graph.num_nodes} nodes, {graph.num_edges} edges, "
        f"{graph.num_classes} classes; {world.world_size} ranks on {world.num_nodes} nodes, "
        f"{device.type}; {steps} steps an epoch of {global_batch} seeds over all ranks "
        f"({len(training) - len(shares) * world.world_size} of {len(training)} training nodes "
        f"dropped an epoch); learning rate {rate:.2g}"
    )

    def evaluate(nodes: Tensor) -> float:
        model.eval()
        mine = nodes[world.rank :: world.world_size]
        correct = 0
        with torch.no_grad():
            for seeds in mine.split(4 * options.batch_size):
                x, adjacency, y = load(seeds)
                correct += int((model(x, adjacency).argmax(dim=1) == y).sum())
        hits, count = ranks.sum(correct, len(mine))
        return hits / count

    losses: list[float] = []
    peak_pss = [0.0] * world.num_nodes
    train_accuracy, started, paused = 0.0, time.monotonic(), 0.0
    for epoch in range(1, options.epochs + 1):
        ddp.train()
        shares.set_epoch(epoch)
        loss_sum = correct = 0.0
        epoch_started = time.monotonic()
        for step, seeds in enumerate(training[list(shares)].split(options.batch_size), 1):
            x, adjacency, y = load(seeds)
            logits = ddp(x, adjacency)
            loss = F.cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            loss_sum += loss.item() * len(seeds)
            correct += int((logits.argmax(dim=1) == y).sum())
            if metrics.due():
                done = step * global_batch
                metrics.write(
                    epoch=epoch,
                    epochs=options.epochs,
                    step=step,
                    steps=steps,
                    loss=loss.item(),
                    seeds_per_second=round(done / (time.monotonic() - epoch_started), 1),
                )
        total, hits, count = ranks.sum(loss_sum, correct, len(shares))
        trained = time.monotonic()
        losses.append(total / count)
        train_accuracy = hits / count
        val_accuracy = evaluate(as_indices(graph.val))
        pss = [0.0] * world.num_nodes
        pss[world.node_rank] = pss_mb()
        peak_pss = [max(a, b) for a, b in zip(peak_pss, ranks.sum(*pss), strict=True)]
        speed = count / (trained - epoch_started)
        say(
            f"epoch {epoch}/{options.epochs}: loss {losses[-1]:.4f}, train accuracy "
            f"{train_accuracy:.4f}, val accuracy {val_accuracy:.4f}, {speed:.0f} seeds/s",
            flush=True,
        )
        metrics.write(
            epoch=epoch,
            epochs=options.epochs,
            loss=losses[-1],
            train_accuracy=train_accuracy,
            val_accuracy=val_accuracy,
            seeds_per_second=round(speed, 1),
        )

    test_accuracy = evaluate(as_indices(graph.test))
    digest = same_weights(ranks, model)
    say(f"test accuracy {test_accuracy:.4f}; the weights of all ranks are the same ({digest[:12]})")
    metrics.write(
        dataset=options.dataset,
        model=options.model,
        world_size=world.world_size,
        epochs=options.epochs,
        losses=losses,
        loss=losses[-1],
        train_accuracy=train_accuracy,
        val_accuracy=val_accuracy,
        test_accuracy=test_accuracy,
        seeds_per_second=round(speed, 1),
        peak_pss_mb_per_node=[round(mb, 1) for mb in peak_pss],
        weights_sha256=digest,
    )


def _silent(*_args: object, **_kwargs: object) -> None:
    """What ranks other than 0 say."""


def main(world: World) -> None:
    """Read the options, get the graph, train."""
    options = parse()
    recipe = datasets.recipe(options)
    root = options.data_dir or default_root(os.environ)
    with process_group(world, options.device, timedelta(minutes=10)) as ranks:
        graph, error = None, None
        try:
            check = lambda: ranks.check("data")  # noqa: E731
            if world.local_rank == 0:
                folder = prepare(
                    root, recipe.folder, recipe.build, timeout=options.data_timeout, check=check
                )
            else:
                folder = wait_for(root, recipe.folder, timeout=options.data_timeout, check=check)
            graph = open_graph(folder)
            if world.world_size > len(graph.train):
                raise WorkloadError("more ranks")
        except WorkloadError as failure:
            error = failure
        ranks.agree("data", error, timeout=options.data_timeout + 30)
        metrics = Metrics(os.environ, world.rank)
        train(ranks, graph, options, metrics)
        metrics.close()


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(prog="sage", description="Train GraphSAGE with neighbour sampling under DDP.")
    add = parser.add_argument
    add("--dataset", choices=datasets.NAMES, default="debian")
    add("--data-dir", type=Path)
    add("--data-timeout", type=float, default=600)
    add("--epochs", type=positive, default=8)
    add("--batch-size", type=positive, default=256)
    add("--fanout", type=integers, default=(10, 10))
    add("--hidden", type=positive, default=256)
    add("--lr", type=float, default=6e-3)
    add("--dropout", type=float, default=0.5)
    add("--model", choices=("sage", "mlp"), default="sage")
    add("--sampler", choices=("auto", "torch", "pyg-lib"), default="auto")
    add("--seed", type=int, default=0)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--num-nodes", type=positive, default=200_000)
    add("--num-edges", type=int, default=20_000_000)
    add("--num-features", type=positive, default=602)
    add("--num-classes", type=positive, default=32)
    add("--data-seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(run("sage", main))
