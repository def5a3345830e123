"""The package graph of Debian 12, shipped as ``files/debian12.npz``; see ``DATA.md``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workloads.common.errors import WorkloadError
from workloads.common.graph import finish_graph, save_array, write_edges
from workloads.datasets.make_debian import NUM_FEATURES

if TYPE_CHECKING:
    from numpy.typing import NDArray

FILE = Path(__file__).parent / "files" / "debian12.npz"


def build(folder: Path, file: Path = FILE) -> None:
    """Unpack the shipped file into a graph whose edges go both ways.

    Raises:
        WorkloadError: The file is missing or damaged.
    """
    try:
        with file.open("rb") as raw, np.load(raw) as packed:
            arrays = {name: packed[name] for name in packed.files}
        y = arrays["y"]
        package, dependency = ragged(arrays["edge_count"], arrays["edge_delta"])
        node, word = ragged(arrays["word_count"], arrays["word_delta"])
        x = np.zeros((len(y), NUM_FEATURES), dtype=np.uint8)
        x[node, word] = 1
        # Both ways, each pair once: two packages may well depend on each other.
        both = np.concatenate([package * len(y) + dependency, dependency * len(y) + package])
        target, source = np.divmod(np.unique(both), len(y))
        splits = {name: arrays[name] for name in ("train", "val", "test")}
        num_classes = len(arrays["classes"])
    except Exception as error:  # zipfile, zlib and numpy raise many kinds
        raise damaged(file, error) from error
    for name, array in {"x": x, "y": y, **splits}.items():
        save_array(folder, name, array)
    write_edges(folder, len(y), lambda: [(source, target)])
    finish_graph(folder, num_classes)


def ragged(count: NDArray[Any], delta: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Undo ``make_debian``'s packing: the row and the column of every entry, as int64."""
    row = np.repeat(np.arange(len(count), dtype=np.int64), count)
    total = np.cumsum(delta, dtype=np.int64)
    # Each row was counted from zero, so what came before the row is taken off again.
    start = np.concatenate([[0], np.cumsum(count, dtype=np.int64)])[:-1]
    before = np.concatenate([[0], total])[start]
    return row, total - before[row]


def damaged(file: Path, error: Exception) -> WorkloadError:
    """Say that the shipped file cannot be used."""
    return WorkloadError(
        f"the data set file {file} is missing or damaged ({error}); "
        f"restore it (git checkout, or install the toolkit again)"
    )
