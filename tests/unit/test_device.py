"""Which device a rank takes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.entrypoint import EntrypointError
from toolkit.entrypoint.device import Device, candidate, choose_device


def test_case_5_1_one_gpu_per_task() -> None:
    device = choose_device(1, 3, 4, ["A", "B", "C", "D"])
    assert device == Device("cuda:0", "nccl")
    assert device.device_ids == [0]


def test_case_5_1_one_gpu_per_task_with_unknown_uuids() -> None:
    assert choose_device(1, 3, 4) == Device("cuda:0", "nccl")
    assert choose_device(1, 3, 4, ["A", None, "C", "D"]) == Device("cuda:0", "nccl")


def test_case_5_2_fewer_gpus_than_ranks() -> None:
    with pytest.raises(EntrypointError, match="8 local ranks but 4 GPUs") as caught:
        choose_device(4, 6, 8, cuda_visible_devices="0,1,2,3")
    assert "'0,1,2,3'" in str(caught.value)
    assert caught.value.exit_code == 71
    assert choose_device(4, 6, 8, oversubscribe=True) == Device("cuda:2", "gloo")
    assert choose_device(4, 6, 8, backend="gloo") == Device("cuda:2", "gloo")
    assert choose_device(4, 6, 8, backend="nccl", oversubscribe=True) == Device("cuda:2", "nccl")


def test_case_5_2_one_visible_gpu_that_four_ranks_share() -> None:
    with pytest.raises(EntrypointError, match="4 local ranks but 1 GPU on"):
        choose_device(1, 3, 4, ["A"] * 4)
    assert choose_device(1, 3, 4, ["A"] * 4, backend="gloo") == Device("cuda:0", "gloo")


def test_ranks_that_see_different_pairs_of_gpus_are_not_sharing() -> None:
    # --gpus-per-task=2 with four tasks: each sees 2 of 8, so counts alone would refuse.
    assert choose_device(2, 3, 4, ["A", "D", "E", "H"]) == Device("cuda:1", "nccl")
    assert candidate(2, 3) == 1


@pytest.mark.parametrize(
    ("value", "visible", "name", "backend"),
    [
        pytest.param("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", 1, "cuda:0", "nccl", id="uuid"),
        pytest.param("GPU-8932f9,GPU-aa11bb", 2, "cuda:0", "nccl", id="short-uuids"),
        pytest.param("", 0, "cpu", "gloo", id="empty"),
        pytest.param("NoDevFiles", 0, "cpu", "gloo", id="NoDevFiles"),
        pytest.param("-1", 0, "cpu", "gloo", id="minus-one"),
    ],
)
def test_case_5_4_the_runtime_counts_not_the_variable(
    value: str, visible: int, name: str, backend: str
) -> None:
    assert choose_device(visible, 0, 1, cuda_visible_devices=value) == Device(name, backend)
    if visible == 0:
        for demand in ({"require_gpu": True}, {"backend": "nccl"}):
            with pytest.raises(EntrypointError) as caught:
                choose_device(visible, 0, 1, cuda_visible_devices=value, **demand)
            assert repr(value) in str(caught.value)


@pytest.mark.parametrize("local_rank", range(4))
def test_case_5_5_all_gpus_visible_to_every_task(local_rank: int) -> None:
    assert choose_device(4, local_rank, 4) == Device(f"cuda:{local_rank}", "nccl")
    uuids = ["A", "B", "C", "D"]
    assert choose_device(4, local_rank, 4, uuids).device_ids == [local_rank]


def test_the_cpu_has_no_device_ids() -> None:
    # DistributedDataParallel raises when it gets a list on the CPU.
    assert choose_device(0, 0, 2).device_ids is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 4, 4), "local rank 4"),
        ((4, -1, 4), "local rank -1"),
        ((1, 0, 2, ["A"]), "1 GPU UUIDs were given for 2"),
    ],
)
def test_nonsense_is_an_error(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(EntrypointError, match=message):
        choose_device(*arguments)


def test_an_unknown_backend_is_an_error() -> None:
    with pytest.raises(EntrypointError, match="'mpi'"):
        choose_device(1, 0, 1, backend="mpi")


@settings(deadline=None)
@given(st.integers(0, 16), st.integers(1, 16), st.data())
def test_ranks_of_a_node_never_share_a_gpu_under_nccl(
    visible: int, size: int, data: st.DataObject
) -> None:
    if visible == 0:
        uuids = None
    else:
        first = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
        uuids = [f"{first[rank]}-{candidate(visible, rank)}" for rank in range(size)]
    try:
        devices = [choose_device(visible, rank, size, uuids) for rank in range(size)]
    except EntrypointError:
        assert uuids is not None
        assert len(set(uuids)) < size
        return
    assert len({device.backend for device in devices}) == 1
    if devices[0].backend == "nccl":
        assert uuids is not None
        assert len(set(uuids)) == size
