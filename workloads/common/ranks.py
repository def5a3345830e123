"""The ranks of a run: how they meet, which device each one takes, and how they fail together."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from toolkit.entrypoint import EntrypointError, codes, resolve
from toolkit.entrypoint.device import candidate, choose_device
from workloads.common.errors import WorkloadError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed.distributed_c10d import Store

    from toolkit.entrypoint import World

# Nodes start minutes apart where one of them still imports the image.
MEETING = timedelta(minutes=10)


class RankError(WorkloadError):
    """An error that one rank has met, and that ends all of them.

    Attributes:
        rank: The rank that met it.
    """

    def __init__(self, message: str, exit_code: int, rank: int) -> None:
        super().__init__(message, exit_code)
        self.rank = rank


@dataclass(frozen=True)
class Ranks:
    """This rank among the others: its ``World``, its device, and the store that all share."""

    world: World
    device: torch.device
    store: Store

    def agree(self, topic: str, error: WorkloadError | None, timeout: float) -> None:
        """Wait until all ranks have come this far; where one of them failed, fail on all.

        Args:
            topic: What this is about; each may be agreed on once in a run.
            error: What this rank has met, or None.
            timeout: Seconds to wait for the others.

        Raises:
            WorkloadError: On every rank, the error of the one that failed.
        """
        _agree(self.store, self.world, topic, error, timeout)

    def check(self, topic: str) -> None:
        """Raise the error that some rank has given to ``agree``, if one has."""
        _check(self.store, topic)

    def sum(self, *values: float) -> list[float]:
        """Add up numbers over all ranks; exact for integers up to 2**53."""
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return [float(value) for value in total]

    def gather(self, value: int) -> list[int]:
        """Collect an integer (64 bits, signed) from every rank."""
        mine = torch.tensor([value], dtype=torch.int64, device=self.device)
        every = [torch.empty_like(mine) for _ in range(self.world.world_size)]
        dist.all_gather(every, mine)
        return [int(one) for one in every]


@contextmanager
def process_group(world: World, device: str, timeout: timedelta) -> Iterator[Ranks]:
    """Meet the other ranks, choose a device, and hold a process group of gloo or NCCL.

    Args:
        world: Who this rank is.
        device: ``auto``, ``cpu`` or ``cuda``.
        timeout: How long a collective may take.

    Raises:
        WorkloadError: On all ranks, where one has no device that it could take.
    """
    world.export(os.environ)  # type: ignore[arg-type]  # as good as a dict
    # An error in NCCL ends the process instead of hanging it. torchrun sets this, srun does not.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world.local_world_size))

    init_method = os.environ.get("TOOLKIT_INIT_METHOD") or "env://"
    store, rank, world_size = next(
        iter(rendezvous(init_method, world.rank, world.world_size, timeout=MEETING))
    )
    chosen = _choose(store, world, device)
    is_cuda = chosen.type == "cuda"
    if is_cuda:
        torch.cuda.set_device(chosen)
    dist.init_process_group(
        backend="nccl" if is_cuda else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        # Raises for a CPU on a build of torch that knows no accelerator.
        device_id=chosen if is_cuda else None,
    )
    yield Ranks(world, chosen, store)
    # A DDP model keeps itself alive in a cycle. Where the group goes before it, torch 2.13 aborts
    # as Python ends, in about one run of ten.
    gc.collect()
    # Not after an exception: others may be in a collective, and leaving in order would wait.
    dist.destroy_process_group()


def _choose(store: Store, world: World, wanted: str) -> torch.device:
    """Choose this rank's device; all ranks take the same kind, or all fail."""
    if wanted == "cpu":
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    uuids = _uuids(store, world, visible)
    device, error = torch.device("cpu"), None
    try:
        device = torch.device(
            choose_device(
                visible,
                world.local_rank,
                world.local_world_size,
                uuids,
                require_gpu=wanted == "cuda",
                cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
            ).name
        )
    except EntrypointError as failure:
        error = WorkloadError(str(failure), failure.exit_code)
    if device.type == "cuda":
        store.add("device/gpus", 1)
    # On one's own machine a run with more ranks than GPUs is a rehearsal, and a CPU will do.
    may_do_without = wanted == "auto" and os.environ.get("TOOLKIT_TARGET") == "local"
    _agree(store, world, "device", None if may_do_without else error, MEETING.total_seconds())
    gpus = store.add("device/gpus", 0)
    if gpus in (0, world.world_size) and not error:
        return device
    if gpus and not may_do_without:
        msg = (
            f"{gpus} of {world.world_size} ranks see a GPU and the others do not: ask for GPUs on "
            f"every node, or train without them by --device cpu"
        )
        raise WorkloadError(msg)
    if visible and world.rank == 0:
        _say("fewer GPUs than ranks: all ranks train on the CPU")
    return torch.device("cpu")


def _uuids(store: Store, world: World, visible: int) -> list[str]:
    """Tell each other, on a node, which GPU each local rank would take; "" where it sees none."""
    mine = ""
    if visible:
        properties = torch.cuda.get_device_properties(candidate(visible, world.local_rank))
        mine = str(getattr(properties, "uuid", ""))  # not in old versions of torch
    store.set(f"device/{world.node_rank}/{world.local_rank}", mine)
    return [
        store.get(f"device/{world.node_rank}/{local_rank}").decode()
        for local_rank in range(world.local_world_size)
    ]


def _agree(
    store: Store, world: World, topic: str, error: WorkloadError | None, timeout: float
) -> None:
    # Of several errors the first counts, and who only repeats what another rank met comes later.
    if error and store.add(f"{topic}/errors", 1) == 1:
        said = {"message": str(error), "exit_code": error.exit_code, "rank": world.rank}
        store.set(f"{topic}/error", json.dumps(said))
    store.add(f"{topic}/arrived", 1)
    deadline = time.monotonic() + timeout
    try:
        # A rank gives its error before it arrives, so once all are here there is none to come.
        while True:
            arrived = store.add(f"{topic}/arrived", 0)
            _check(store, topic)
            if arrived == world.world_size:
                return
            if time.monotonic() > deadline:
                msg = (
                    f"rank {world.rank} waited {timeout:g} s ({topic}), and {arrived} of "
                    f"{world.world_size} ranks came: look at the logs of the others"
                )
                raise WorkloadError(msg, codes.RENDEZVOUS)
            time.sleep(0.05)
    except RankError:
        # Rank 0 holds the store, so it stays a moment for the others to read why they end.
        store.add(f"{topic}/read", 1)
        deadline = time.monotonic() + 2
        while (
            world.rank == 0
            and store.add(f"{topic}/read", 0) < world.world_size
            and time.monotonic() < deadline
        ):
            time.sleep(0.02)
        raise


def _check(store: Store, topic: str) -> None:
    if store.check([f"{topic}/error"]):
        said: dict[str, Any] = json.loads(store.get(f"{topic}/error"))
        raise RankError(said["message"], said["exit_code"], said["rank"])


def same_weights(ranks: Ranks, model: torch.nn.Module) -> str:
    """Return the SHA-256 of the weights, which must be the same on all ranks.

    Raises:
        WorkloadError: They are not.
    """
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.cpu().numpy().tobytes())
    every = ranks.gather(int.from_bytes(digest.digest()[:8], "big", signed=True))
    if len(set(every)) > 1:
        msg = f"after training the ranks hold {len(set(every))} different sets of weights"
        raise WorkloadError(msg, 1)
    return digest.hexdigest()


#: A launcher ends the others as soon as one has ended; on a busy machine ranks start seconds apart.
SILENCE = 5.0


def run(name: str, main: Callable[[World], None]) -> int:
    """Call ``main`` with this process's World, and return the exit code.

    An error meant for the user is one paragraph on stderr. The rank that met it says it first, or
    rank 0 where all meet it alike, and ends at once; the others follow some seconds later with the
    same code, so that a launcher first sees the rank that has something to say.
    """
    try:
        world = resolve(os.environ)
    except EntrypointError as error:
        if error.rank:
            time.sleep(SILENCE)
        _say(f"{name}: {error}")
        return error.exit_code
    try:
        main(world)
    except WorkloadError as error:
        origin = error.rank if isinstance(error, RankError) else 0
        if world.rank == origin:
            _say(f"{name}: {error}")
            return error.exit_code
        time.sleep(SILENCE)
        if isinstance(error, RankError):
            _say(f"{name}: rank {origin} ended the run: {error}")
        return error.exit_code
    except dist.DistError as error:
        reason = str(error).splitlines()[0]
        _say(f"{name}: rank {world.rank} lost the other ranks: {reason}")
        return codes.RENDEZVOUS
    except KeyboardInterrupt:
        return codes.CANCELLED
    return 0


def _say(text: str) -> None:
    """Write a line in one piece, since several ranks may share stderr."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
