"""The ranks of a run: how they meet, which device each one takes, and how they fail together."""

from __future__ import annotations

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
from torch import Tensor

from toolkit.entrypoint import EntrypointError, resolve
from toolkit.entrypoint.device import choose_device
from workloads.common.errors import WorkloadError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from toolkit.entrypoint import World

# Nodes start minutes apart where one still imports the image.
MEETING = timedelta(minutes=10)


@dataclass(frozen=True)
class Ranks:
    """This rank among the others: its ``World``, its device, and the store that all share."""

    world: World
    device: torch.device
    store: dist.Store

    def agree(self, topic: str, error: WorkloadError | None = None, timeout: float = 600) -> None:
        """Wait until all ranks have come this far; where one of them failed, fail on all.

        Raises:
            WorkloadError: The error of the rank that failed, on every rank.
        """
        _agree(self.store, self.world, topic, error, timeout)

    def check(self, topic: str) -> None:
        """Raise the error that a rank has given to ``agree``, if any has."""
        _check(self.store, topic)

    def sum(self, *values: float) -> list[float]:
        """Add up numbers over all ranks; exact for integers up to 2**53."""
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def gather(self, value: int) -> list[int]:
        """Collect one integer (64 bits, signed) from every rank."""
        mine = torch.tensor([value], device=self.device)
        every = [torch.empty_like(mine) for _ in range(self.world.world_size)]
        dist.all_gather(every, mine)
        return [int(one) for one in every]


class _RankError(WorkloadError):
    """An error that one rank met and all end with."""

    def __init__(self, message: str, exit_code: int, rank: int) -> None:
        super().__init__(message, exit_code)
        self.rank = rank


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
    os.environ.update(
        WORLD_SIZE=str(world.world_size),
        RANK=str(world.rank),
        LOCAL_RANK=str(world.local_rank),
        MASTER_ADDR=world.master_addr,
        MASTER_PORT=str(world.master_port),
    )
    # NCCL errors end the process instead of hanging it; torchrun sets this, srun does not.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    init_method = os.environ.get("TOOLKIT_INIT_METHOD") or "env://"
    store, rank, world_size = next(
        iter(dist.rendezvous(init_method, world.rank, world.world_size, timeout=MEETING))
    )
    chosen = _choose(store, world, device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    dist.init_process_group(
        backend="nccl" if chosen.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        # A CPU as device_id raises on a build of torch without an accelerator.
        device_id=chosen if chosen.type == "cuda" else None,
    )
    try:
        yield Ranks(world, chosen, store)
    finally:
        # Where an exception passes through, other ranks may be in a collective that never ends,
        # and leaving the group in order could wait for them.
        if sys.exc_info()[0] is None:
            dist.destroy_process_group()


def _choose(store: dist.Store, world: World, wanted: str) -> torch.device:
    """Choose this rank's device; all ranks take the same kind, or all fail."""
    visible = torch.cuda.device_count() if wanted != "cpu" else 0
    error, index = None, None
    if visible:
        uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(visible)]
        store.set(f"uuids/{world.rank}", json.dumps(uuids))
        index = choose_device(visible, world.local_rank, world.local_world_size, uuids)
    elif wanted == "cuda":
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        error = WorkloadError(f"--device cuda, but no GPU is visible (CUDA_VISIBLE_DEVICES={seen})")
    _agree(store, world, "device", error)
    return torch.device("cpu") if index is None else torch.device("cuda", index)


def _agree(
    store: dist.Store,
    world: World,
    topic: str,
    error: WorkloadError | None = None,
    timeout: float = 600,
) -> None:
    if error:
        said = {"message": str(error), "exit_code": error.exit_code, "rank": world.rank}
        store.set(f"{topic}/error", json.dumps(said))
    store.add(f"{topic}/arrived", 1)
    deadline = time.monotonic() + timeout
    try:
        while True:
            everyone = store.add(f"{topic}/arrived", 0) == world.world_size
            _check(store, topic)
            if everyone:
                return
            if time.monotonic() > deadline:
                msg = f"rank {world.rank} waited {timeout:g} s for other ranks ({topic})"
                raise WorkloadError(msg, 76)
            time.sleep(0.05)
    except _RankError:
        # Rank 0 holds the store: it stays until the others have read why they end.
        store.add(f"{topic}/read", 1)
        deadline = time.monotonic() + 2
        while (
            world.rank == 0
            and store.add(f"{topic}/read", 0) < world.world_size
            and time.monotonic() < deadline
        ):
            time.sleep(0.02)
        raise


def _check(store: dist.Store, topic: str) -> None:
    if store.check([f"{topic}/error"]):
        said: dict[str, Any] = json.loads(store.get(f"{topic}/error"))
        raise _RankError(said["message"], said["exit_code"], said["rank"])


def run(name: str, main: Callable[[World], None]) -> int:
    """Call ``main`` with this process's World; return the exit code.

    An error that can be told to the user is one paragraph on stderr. The rank that met it says
    it, or rank 0 where all meet it alike, and ends at once; the others follow a second later with
    the same code, so that a launcher sees the rank first that has something to say.
    """
    try:
        world = resolve(os.environ)
    except EntrypointError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return error.exit_code
    try:
        main(world)
    except WorkloadError as error:
        origin = error.rank if isinstance(error, _RankError) else 0
        if world.rank == origin:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(1)
            if isinstance(error, _RankError):
                print(f"{name}: ended with rank {origin}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


def same_weights(ranks: Ranks, model: torch.nn.Module) -> str:
    """Return a digest of the weights, which must be the same on all ranks.

    Raises:
        WorkloadError: The ranks hold different weights.
    """
    import hashlib  # noqa: PLC0415

    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.detach().cpu().numpy().tobytes())
    head = int.from_bytes(digest.digest()[:8], "big", signed=True)
    every = ranks.gather(head)
    if len(set(every)) != 1:
        msg = f"the ranks hold different weights after training: {every}"
        raise WorkloadError(msg, 1)
    return digest.hexdigest()


def as_indices(array: Any) -> Tensor:
    """Node numbers as torch wants them: int64."""
    return torch.from_numpy(array).long()
