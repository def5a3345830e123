"""``workloads.fashion_mnist``: files as users have them, real ranks, and the real images."""

from __future__ import annotations

import gzip
import struct
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.unit.workload_ranks import ROOT, read_metrics, run_ranks
from workloads import fashion_mnist as workload
from workloads.common.errors import WorkloadError
from workloads.datasets import fashion_mnist

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from workloads.datasets.fashion_mnist import Images


def idx(array: NDArray[Any], magic: int | None = None) -> bytes:
    """An array of bytes in the IDX format."""
    header = [magic if magic is not None else 0x0800 | array.ndim, *array.shape]
    return struct.pack(f">{len(header)}I", *header) + array.astype(np.uint8).tobytes()


def pictures(count: int, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Noise, and a bright bar whose place is the class."""
    random = np.random.default_rng(seed)
    y = random.integers(10, size=count)
    x = random.integers(100, size=(count, 28, 28))
    for image, label in zip(x, y, strict=True):
        image[2 * label + 4 : 2 * label + 6] = 255
    return x, y


def write(folder: Path, part: str, count: int, *, pack: bool = True) -> None:
    x, y = pictures(count, seed=count)
    for name, array in (("images-idx3", x), ("labels-idx1", y)):
        file = folder / f"{part}-{name}-ubyte{'.gz' if pack else ''}"
        file.write_bytes(gzip.compress(idx(array)) if pack else idx(array))


@pytest.fixture
def extract(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    write(folder, "train", 1201)
    write(folder, "t10k", 203)
    return folder


@pytest.mark.parametrize("pack", [True, False])
def test_files_are_read_packed_or_not(tmp_path: Path, pack: bool) -> None:
    write(tmp_path, "train", 5, pack=pack)
    write(tmp_path, "t10k", 3, pack=pack)
    images: tuple[Images, Images] = fashion_mnist.read(tmp_path)
    for part, count in zip(images, (5, 3), strict=True):
        x, y = pictures(count, seed=count)
        assert np.array_equal(part.x, x)
        assert np.array_equal(part.y, y)


IMAGES, LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        (IMAGES, lambda data: data[: len(data) // 2], "is damaged"),
        (IMAGES, lambda _: b"", "is damaged"),
        (IMAGES, lambda _: b"<html>not found</html>", "is damaged"),
        (IMAGES, lambda _: gzip.compress(b"\0\0"), "is damaged"),
        (IMAGES, lambda _: gzip.compress(idx(pictures(2, 0)[0])[:-1]), "1567 bytes"),
        (IMAGES, lambda _: gzip.compress(idx(pictures(2, 0)[0], magic=0x0D03)), "magic 0xd03"),
        (IMAGES, lambda _: gzip.compress(idx(np.zeros((5, 32, 32)))), "do not belong together"),
        (LABELS, lambda _: gzip.compress(idx(np.zeros(4))), "do not belong together"),
        (LABELS, lambda _: gzip.compress(idx(np.full(5, 10))), "do not belong together"),
    ],
)
def test_damaged_files_are_told(
    tmp_path: Path, name: str, change: Callable[[bytes], bytes], text: str
) -> None:
    write(tmp_path, "train", 5)
    write(tmp_path, "t10k", 3)
    file = tmp_path / name
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(WorkloadError, match=text) as caught:
        fashion_mnist.read(tmp_path)
    assert caught.value.exit_code == 2
    assert str(tmp_path) in str(caught.value)


def test_two_ranks_learn_from_files_that_the_user_names(extract: Path, tmp_path: Path) -> None:
    result = run_ranks(
        *(1, 2),
        ["fashion_mnist", "--data-dir", str(extract), "--epochs", "3"],
        folder=tmp_path,
        environ={"TOOLKIT_RUN_DIR": str(tmp_path)},
    )
    assert result.codes == [0, 0], result.err
    assert result.out[1] == ""
    lines, metrics = read_metrics(tmp_path)
    # An accuracy is a count over all images: not one was left out or counted twice.
    for name, images in (("test_accuracy", 203), ("train_accuracy", 1200)):
        hits = metrics[name] * images
        assert hits == pytest.approx(round(hits), abs=1e-6)
    assert metrics["test_accuracy"] > 0.9
    assert metrics["epochs"] == len(metrics["losses"]) == 3
    assert metrics["losses"][-1] < metrics["losses"][0]
    assert (metrics["world_size"], metrics["device"]) == (2, "cpu")
    assert {"epoch", "epochs", "step", "steps", "loss", "images_per_second"} in [
        set(line) for line in lines
    ]


@pytest.mark.skipif(
    not fashion_mnist.DEBIAN.is_dir(), reason="Debian's dataset-fashion-mnist is not installed"
)
def test_an_epoch_of_the_real_images_on_two_ranks(tmp_path: Path) -> None:
    result = run_ranks(
        *(1, 2), ["fashion_mnist"], folder=tmp_path, environ={"TOOLKIT_RUN_DIR": str(tmp_path)}
    )
    assert result.codes == [0, 0], result.err
    assert "60000 images for training, 10000 for testing" in result.out[0]
    assert read_metrics(tmp_path)[1]["test_accuracy"] >= 0.83


def test_no_images_ends_all_ranks_and_names_the_package(tmp_path: Path) -> None:
    result = run_ranks(
        1, 2, ["fashion_mnist", "--data-dir", str(tmp_path / "none")], folder=tmp_path
    )
    assert result.codes == [2, 2]
    first = min((0, 1), key=result.ended.__getitem__)
    for text in (str(tmp_path / "none"), "dataset-fashion-mnist", "--data-dir"):
        assert text in result.err[first]
    assert all(len(err.strip().splitlines()) == 1 for err in result.err)


def test_more_ranks_than_images(tmp_path: Path) -> None:
    write(tmp_path, "train", 1)
    write(tmp_path, "t10k", 3)
    result = run_ranks(
        1, 2, ["fashion_mnist", "--data-dir", str(tmp_path)], folder=tmp_path / "logs"
    )
    assert result.codes == [2, 2]
    assert "world size 2, but there are 1 training images" in result.err[0]


@pytest.mark.parametrize("module", ["fashion_mnist", "allreduce"])
def test_images_without_pyg_will_do(module: str) -> None:
    code = f"import sys; sys.modules['torch_geometric'] = None; import workloads.{module}"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--epochs", "0"], "'0' is not an integer of 1 or more"),
        (["--batch-size", "x"], "'x' is not an integer"),
        (["--lr", "-1"], "'-1' is not a number above 0"),
        (["--device", "tpu"], "'tpu'"),
        (["--fanout", "10"], "--fanout"),
    ],
)
def test_wrong_options(arguments: list[str], text: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        workload.parse(arguments)
    assert caught.value.exit_code == 2
    assert text in str(caught.value)
