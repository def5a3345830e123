"""Fashion-MNIST from files in the IDX format, packed or not.

Source of the format: http://yann.lecun.com/exdb/mnist (a magic number that tells the type and how
many dimensions there are, the dimensions, the bytes; all big-endian).
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from workloads.common.errors import WorkloadError

if TYPE_CHECKING:
    from numpy.typing import NDArray

DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # the package dataset-fashion-mnist
CLASSES = 10
SIDE = 28
UINT8 = 0x08  # of the IDX format


@dataclass(frozen=True)
class Images:
    """Grey images and their classes.

    Attributes:
        x: [images, 28, 28], uint8.
        y: [images], uint8, below 10.
    """

    x: NDArray[np.uint8]
    y: NDArray[np.uint8]


def read(folder: Path | None) -> tuple[Images, Images]:
    """Read the training and the test images.

    Args:
        folder: Where the four files are; None for those of Debian's package.

    Raises:
        WorkloadError: A file is missing or damaged.
    """
    return _read(folder or DEBIAN, "train"), _read(folder or DEBIAN, "t10k")


def _read(folder: Path, part: str) -> Images:
    x = _read_idx(folder / f"{part}-images-idx3-ubyte", 3)
    y = _read_idx(folder / f"{part}-labels-idx1-ubyte", 1)
    if x.shape != (len(y), SIDE, SIDE) or not len(y) or y.max() >= CLASSES:
        msg = (
            f"{folder}: the {part} files do not belong together: images {x.shape}, labels "
            f"{y.shape}; images of {SIDE}x{SIDE} and as many labels from 0 to {CLASSES - 1} are "
            f"needed"
        )
        raise WorkloadError(msg)
    return Images(x, y)


def _read_idx(file: Path, dimensions: int) -> NDArray[np.uint8]:
    packed = file.with_name(f"{file.name}.gz")
    try:
        data = gzip.decompress(packed.read_bytes()) if packed.exists() else file.read_bytes()
        magic, *shape = struct.unpack_from(f">{1 + dimensions}I", data)
        found = np.frombuffer(data, np.uint8, offset=4 * (1 + dimensions))
    except FileNotFoundError as error:
        msg = (
            f"there is no {file.name}[.gz] in {file.parent}: install Debian's package "
            f"dataset-fashion-mnist (apt-get install dataset-fashion-mnist), or name the folder "
            f"that holds the files of Fashion-MNIST by --data-dir"
        )
        raise WorkloadError(msg) from error
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise WorkloadError(f"{file}[.gz] is damaged or cannot be read: {error}") from error
    if magic != UINT8 << 8 | dimensions or len(found) != math.prod(shape):
        msg = f"{file}[.gz] is damaged: {len(found)} bytes for {shape} (magic {magic:#x})"
        raise WorkloadError(msg)
    return found.reshape(shape).copy()  # torch warns of memory that it may not write
