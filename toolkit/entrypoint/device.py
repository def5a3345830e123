"""Which device a rank takes, decided from what the runtime sees.

Called by the workloads, which have torch to count with; the entrypoint itself never imports it.
CUDA_VISIBLE_DEVICES is not read: it may hold indices, UUIDs, shortened UUIDs, ``NoDevFiles`` or
nothing. It is only quoted in errors.
"""

from __future__ import annotations

from typing import NamedTuple

from toolkit.entrypoint.world import EntrypointError, quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


class Device(NamedTuple):
    """A rank's device and the backend that its process group can use there.

    Attributes:
        name: ``cpu`` or ``cuda:N``, as torch.device takes it.
        backend: ``nccl`` or ``gloo``, as init_process_group takes it.
    """

    name: str
    backend: str

    @property
    def device_ids(self) -> list[int] | None:
        """What DistributedDataParallel takes: ``[N]``, or None on the CPU, where a list raises."""
        return None if self.name == "cpu" else [int(self.name.partition(":")[2])]


def candidate(visible: int, local_rank: int) -> int:
    """The index of the GPU that a rank would take, to look up its UUID before choosing.

    Where each rank sees GPUs of its own the count says nothing about the node, so the local rank
    wraps around; whether ranks then collide is for the UUIDs to say.
    """
    return local_rank % visible


def choose_device(
    visible: int,
    local_rank: int,
    local_world_size: int,
    uuids: Sequence[str | None] | None = None,
    *,
    backend: str | None = None,
    oversubscribe: bool = False,
    require_gpu: bool = False,
    cuda_visible_devices: str | None = None,
) -> Device:
    """Choose this rank's device and backend.

    Args:
        visible: how many GPUs the runtime sees in this process.
        local_rank: 0 <= local_rank < local_world_size.
        local_world_size: number of ranks on this node.
        uuids: for each local rank in order, the UUID of the GPU at its ``candidate`` index; None
            where any of that is unknown. GPUs can only be told apart by them: four ranks that see
            one GPU each may have four, or share one.
        backend: ``nccl`` or ``gloo`` to insist on it, None for the one that works.
        oversubscribe: whether ranks may share a GPU; they then use gloo, since NCCL refuses two
            ranks on one GPU, unless ``backend`` insists.
        require_gpu: whether the CPU will not do.
        cuda_visible_devices: the value of CUDA_VISIBLE_DEVICES, to be quoted in errors.

    Returns:
        The device and the backend.

    Raises:
        EntrypointError: no GPU where one is required, or more local ranks than GPUs under NCCL.
    """
    quoted = "unset" if cuda_visible_devices is None else quote(cuda_visible_devices)
    where = f"CUDA_VISIBLE_DEVICES is {quoted}"
    if backend not in (None, "nccl", "gloo"):
        raise EntrypointError(f"backend {quote(str(backend))} is neither nccl nor gloo.")
    if not 0 <= local_rank < local_world_size:
        raise EntrypointError(
            f"local rank {local_rank} is not below the local world size {local_world_size}."
        )
    if visible < 1:
        if require_gpu or backend == "nccl":
            raise EntrypointError(
                f"A GPU is required ({'backend nccl' if backend == 'nccl' else 'by request'}) but "
                f"local rank {local_rank} sees none; {where}. Ask Slurm for GPUs "
                "(--gpus-per-node), or run on the CPU with gloo."
            )
        return Device("cpu", "gloo")
    index = candidate(visible, local_rank)
    if uuids is not None and len(uuids) != local_world_size:
        raise EntrypointError(
            f"{len(uuids)} GPU UUIDs were given for {local_world_size} local ranks."
        )
    if uuids is not None and all(uuids):
        gpus = len(set(uuids))
        shared = gpus < local_world_size
    else:
        # One GPU each is how --gpus-per-task looks, so without UUIDs it is believed.
        gpus = visible
        shared = visible > 1 and local_world_size > visible
    if shared and not oversubscribe and backend != "gloo":
        raise EntrypointError(
            f"{local_world_size} local ranks but {gpus} GPU{'s' if gpus > 1 else ''} on this node "
            f"(local rank {local_rank} sees {visible}; {where}), and NCCL takes one rank per GPU: "
            f"start {gpus} ranks per node, ask for more GPUs, or allow sharing by "
            "oversubscription or the gloo backend."
        )
    return Device(f"cuda:{index}", backend or ("gloo" if shared else "nccl"))
