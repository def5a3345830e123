"""A small CNN on Fashion-MNIST under DistributedDataParallel: the first job on a new cluster.

    toolkit run --nodes 2 fashion_mnist            # or any launcher that sets ranks:
    torchrun --nproc-per-node 2 -m workloads.fashion_mnist --data-dir DIR

Every rank holds the images (55 MB), trains on its own share of them, and averages gradients with
the others: gloo between CPUs, NCCL between GPUs.
"""

from __future__ import annotations

import math
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, TensorDataset

from workloads.common.errors import WorkloadError
from workloads.common.metrics import Metrics
from workloads.common.options import Parser, natural, positive, positive_float, process_options
from workloads.common.ranks import Ranks, process_group, run, same_weights
from workloads.datasets import fashion_mnist
from workloads.datasets.fashion_mnist import CLASSES, Images

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from toolkit.entrypoint import World

REFERENCE_BATCH = 128  # images a step, over all ranks, for which --lr is meant
MEAN, DEVIATION = 0.286, 0.353  # of the training images, as parts of 255


class CNN(nn.Module):
    """Two convolutions, each with pooling, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=5, padding=2)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=5, padding=2)
        self.linear1 = nn.Linear(32 * 7 * 7, 128)
        self.linear2 = nn.Linear(128, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Classify images: [n, 28, 28] of uint8 to [n, 10]."""
        x = ((x.float() / 255 - MEAN) / DEVIATION).unsqueeze(1)
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        out: Tensor = self.linear2(functional.relu(self.linear1(x.flatten(1))))
        return out


def train(
    ranks: Ranks, images: Images, test: Images, options: argparse.Namespace, metrics: Metrics
) -> None:
    """Train, evaluate and report; every rank runs this on its share of the images."""
    world, device = ranks.world, ranks.device
    x, y = torch.from_numpy(images.x), torch.from_numpy(images.y).long()

    torch.manual_seed(options.seed)
    model = CNN().to(device)
    # DDP gives all ranks rank 0's weights.
    ddp = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)

    # drop_last: all ranks take the same number of steps, for one that took a step more would wait
    # for the others for ever. It costs at most world_size - 1 images, others each epoch.
    share_of_rank: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(
        TensorDataset(x), world.world_size, world.rank, seed=options.seed, drop_last=True
    )
    steps = math.ceil(len(share_of_rank) / options.batch_size)
    global_batch = min(options.batch_size, len(share_of_rank)) * world.world_size
    # Adam's rate goes with the root of the batch (Malladi et al., 2022), and falls to nothing.
    rate = options.lr * math.sqrt(global_batch / REFERENCE_BATCH)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: 1 - n / (steps * options.epochs)
    )
    metrics.say(
        f"Fashion-MNIST: {len(x)} images for training, {len(test.x)} for testing; "
        f"world size {world.world_size} on {world.num_nodes} node(s), {device.type}"
    )
    metrics.say(
        f"{steps} steps an epoch of {global_batch} images over all ranks, learning rate {rate:.2g}"
    )

    losses = []
    for epoch in range(1, options.epochs + 1):
        model.train()
        share_of_rank.set_epoch(epoch)
        started, loss_sum, correct = time.monotonic(), 0.0, 0
        mine = torch.tensor(list(share_of_rank))
        for step, chosen in enumerate(mine.split(options.batch_size), 1):  # type: ignore[no-untyped-call]
            labels = y[chosen].to(device)
            logits = ddp(x[chosen].to(device))
            loss = functional.cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()

            loss_sum += loss.item() * len(chosen)
            correct += int((logits.argmax(dim=1) == labels).sum())
            done = min(step * options.batch_size, len(mine)) * world.world_size
            speed = round(done / (time.monotonic() - started), 1)
            if metrics.due():
                metrics.write(
                    epoch=epoch,
                    epochs=options.epochs,
                    step=step,
                    steps=steps,
                    loss=loss.item(),
                    images_per_second=speed,
                )

        total, hits, count = ranks.sum(loss_sum, correct, len(mine))
        losses.append(total / count)
        test_accuracy = evaluate(model, test, ranks, options.batch_size)
        epoch_metrics = {
            "epoch": epoch,
            "epochs": options.epochs,
            "loss": losses[-1],
            "train_accuracy": hits / count,
            "test_accuracy": test_accuracy,
            "images_per_second": speed,
        }
        metrics.write(**epoch_metrics)
        metrics.say(
            f"epoch {epoch}/{options.epochs}: loss {losses[-1]:.4f}, train accuracy "
            f"{hits / count:.4f}, test accuracy {test_accuracy:.4f}, {speed:.0f} images/s"
        )

    digest = same_weights(ranks, model)
    metrics.say(f"test accuracy {test_accuracy:.4f}; all ranks hold the weights {digest[:12]}")
    metrics.write(
        **epoch_metrics,
        losses=losses,
        weights_sha256=digest,
        world_size=world.world_size,
        device=device.type,
        dataset="fashion-mnist",
    )


@torch.no_grad()
def evaluate(model: nn.Module, images: Images, ranks: Ranks, batch_size: int) -> float:
    """Return the accuracy over ``images``: every rank counts its share, and none is left out."""
    model.eval()
    share = slice(ranks.world.rank, None, ranks.world.world_size)
    x, y = torch.from_numpy(images.x[share]), torch.from_numpy(images.y[share])
    correct = 0
    for i in range(0, len(x), 4 * batch_size):
        part = slice(i, i + 4 * batch_size)
        guess = model(x[part].to(ranks.device)).argmax(dim=1)
        correct += int((guess == y[part].to(ranks.device)).sum())
    hits, count = ranks.sum(correct, len(x))
    return hits / count


def load(ranks: Ranks, folder: Path | None) -> tuple[Images, Images]:
    """Read the images on every rank.

    Raises:
        WorkloadError: On all ranks, where one of them cannot.
    """
    error = None
    try:
        found = fashion_mnist.read(folder)
    except WorkloadError as failure:
        error = failure
    ranks.agree("data", error, timeout=300)
    return found


def main(world: World) -> None:
    """Read the options, get the images, train."""
    options = parse()
    with process_group(world, options.device, timedelta(seconds=options.timeout)) as ranks:
        images, test = load(ranks, options.data_dir)
        if len(images.x) < world.world_size:
            msg = f"world size {world.world_size}, but there are {len(images.x)} training images"
            raise WorkloadError(msg)
        metrics = Metrics(os.environ, world.rank)
        train(ranks, images, test, options, metrics)
        metrics.close()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the options, from the command line unless they are given.

    Raises:
        WorkloadError: One of them is wrong.
    """
    parser = Parser("fashion_mnist", "Train a small CNN on Fashion-MNIST under DDP.")
    add = parser.add_argument_group("training").add_argument
    add("--epochs", type=positive, default=1)
    add("--batch-size", type=positive, default=64, help="images a step on each rank (64)")
    add(
        "--lr",
        type=positive_float,
        default=2e-3,
        help=f"Adam's rate for {REFERENCE_BATCH} images over all ranks (0.002); it is multiplied "
        f"by the root of the images over all ranks / {REFERENCE_BATCH}",
    )
    add("--seed", type=natural, default=0)
    add(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help=f"the folder with train-images-idx3-ubyte[.gz] and the other three files "
        f"({fashion_mnist.DEBIAN}, of Debian's package dataset-fashion-mnist)",
    )
    process_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(run("fashion_mnist", main))
