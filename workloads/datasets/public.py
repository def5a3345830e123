"""Public data sets that are downloaded: Reddit through PyG, ogbn-products through OGB.

Sources: Hamilton et al., "Inductive Representation Learning on Large Graphs" (2017); Hu et al.,
"Open Graph Benchmark" (2020).
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import shutil
import socket
import sys
from typing import TYPE_CHECKING, Any

from workloads.common.errors import WorkloadError
from workloads.common.graph import finish_graph, index_dtype, save_array, save_edges

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

SILENCE = 60.0  # seconds without a byte after which a download has failed


def build_reddit(folder: Path) -> None:
    """Download Reddit (233k nodes, 115M edges, about 1.4 GB) and write its arrays."""
    from torch_geometric.datasets import Reddit  # noqa: PLC0415

    with _downloading("reddit", folder / "raw") as raw:
        data: Any = Reddit(str(raw))[0]
    splits = {
        name: data[f"{name}_mask"].nonzero().squeeze(1).numpy() for name in ("train", "val", "test")
    }
    write(folder, data.edge_index.numpy(), data.x.numpy(), data.y.numpy(), splits)


def build_ogbn_products(folder: Path) -> None:
    """Download ogbn-products (2.4M nodes, 124M edges, about 1.5 GB) and write its arrays.

    Raises:
        WorkloadError: OGB is not installed, or the download failed.
    """
    if importlib.util.find_spec("ogb") is None:
        msg = "--dataset ogbn-products needs OGB, which is not installed here: pip install ogb"
        raise WorkloadError(msg)
    with _downloading("ogbn-products", folder / "raw") as raw:
        # Not OGB's class for PyG: it unpickles its own file, which torch 2.6 and later refuse.
        from ogb.nodeproppred import NodePropPredDataset  # noqa: PLC0415

        dataset: Any = NodePropPredDataset("ogbn-products", str(raw))
        graph, labels = dataset[0]
        split = dataset.get_idx_split()
    splits = {"train": split["train"], "val": split["valid"], "test": split["test"]}
    write(folder, graph["edge_index"], graph["node_feat"], labels.reshape(-1), splits)


def write(
    folder: Path,
    edge_index: NDArray[Any],
    x: NDArray[Any],
    y: NDArray[Any],
    splits: Mapping[str, NDArray[Any]],
) -> None:
    """Write a graph that is in memory, in PyG's terms.

    Args:
        folder: An empty folder.
        edge_index: [2, edges]: messages go from the first row to the second.
        x: [nodes, features].
        y: [nodes], classes counted from 0.
        splits: Node numbers by ``train``, ``val`` and ``test``.
    """
    save_edges(folder, edge_index[0], edge_index[1], len(y))
    save_array(folder, "x", x)
    save_array(folder, "y", y)
    for name, nodes in splits.items():
        save_array(folder, name, nodes.astype(index_dtype(len(y))))
    finish_graph(folder, int(y.max()) + 1)


@contextlib.contextmanager
def _downloading(name: str, raw: Path) -> Iterator[Path]:
    """Give a folder for a download, say clearly what went wrong, and remove the folder."""
    before, stdin = socket.getdefaulttimeout(), sys.stdin
    socket.setdefaulttimeout(SILENCE)
    # OGB asks whether to go on with a large download: whoever names the data set wants it.
    sys.stdin = io.StringIO("y\n")
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield raw
    except Exception as error:
        msg = (
            f"{name} could not be downloaded ({type(error).__name__}: {error}); run once with "
            f"--data-dir on a machine that reaches the Internet, and use the same folder here"
        )
        raise WorkloadError(msg) from error
    finally:
        socket.setdefaulttimeout(before)
        sys.stdin = stdin
        shutil.rmtree(raw, ignore_errors=True)
