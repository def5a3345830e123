"""Public data sets that are downloaded: Reddit and ogbn-products.

Their files are read as streams: memory holds a part of a table and never the whole.

Sources: Hamilton et al., "Inductive Representation Learning on Large Graphs" (2017), in the form of
DGL's that PyG's ``Reddit`` reads; Hu et al., "Open Graph Benchmark" (2020), in the form that OGB's
``NodePropPredDataset`` reads.
"""

from __future__ import annotations

import contextlib
import gzip
import math
import shutil
import socket
import sys
import zipfile
import zlib
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from workloads.common.errors import WorkloadError
from workloads.common.graph import (
    create_array,
    finish_graph,
    index_dtype,
    save_array,
    whole_or_not,
    write_edges,
    write_rows,
)
from workloads.common.prepare import Recipe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from workloads.common.prepare import Pieces

SILENCE = 60.0  # seconds without a byte after which a download has failed
DAMAGE = (zipfile.BadZipFile, gzip.BadGzipFile, zlib.error)
PART = 1 << 21  # numbers in memory at a time


@dataclass(frozen=True)
class Source:
    """Where a data set is, and how its files become the arrays of a graph.

    Attributes:
        url: A zip file.
        pieces: Gives what writes the arrays of a folder from the unpacked zip file, by name.
    """

    url: str
    pieces: Callable[[Path, Path], Pieces]


def recipe(name: str, version: int) -> Recipe:
    """How one of ``SOURCES`` is made."""
    source = SOURCES[name]
    return Recipe(
        f"{name}-v{version}",
        partial(_download, name=name, url=source.url),
        partial(_pieces, name=name, source=source),
        _finish,
    )


def _download(folder: Path, name: str, url: str) -> None:
    """Download and unpack, unless that is done; a part of a file is never taken for the whole."""
    from torch_geometric.data import download_url, extract_zip  # noqa: PLC0415

    if (folder / "raw").exists():
        return
    temporary, before = folder / "raw.new", socket.getdefaulttimeout()
    shutil.rmtree(temporary, ignore_errors=True)
    socket.setdefaulttimeout(SILENCE)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            file = download_url(url, str(temporary))
            extract_zip(file, str(temporary), log=False)
        (temporary / url.rpartition("/")[2]).unlink()
        temporary.rename(folder / "raw")
    except Exception as error:
        msg = (
            f"{name} could not be downloaded ({type(error).__name__}: {error}); run once with "
            f"--data-dir on a machine that reaches the Internet, and use the same folder here"
        )
        raise WorkloadError(msg) from error
    finally:
        socket.setdefaulttimeout(before)
        shutil.rmtree(temporary, ignore_errors=True)


def _pieces(folder: Path, name: str, source: Source) -> Pieces:
    """The pieces of a source, which say what to do where the files are not what they should be."""

    def checked(make: Callable[[], None]) -> None:
        try:
            make()
        except (ValueError, KeyError, EOFError, StopIteration, *DAMAGE) as error:
            msg = (
                f"{name}: the files that were downloaded to {folder / 'raw'} are damaged "
                f"({type(error).__name__}: {error}); remove {folder} and run again"
            )
            raise WorkloadError(msg) from error

    made = source.pieces(folder, folder / "raw")
    return {piece: partial(checked, make) for piece, make in made.items()}


def _finish(folder: Path) -> None:
    finish_graph(folder, int(np.load(folder / "y.npy").max()) + 1)
    shutil.rmtree(folder / "raw", ignore_errors=True)


def _reddit(folder: Path, raw: Path) -> Pieces:
    nodes, graph = raw / "reddit_data.npz", raw / "reddit_graph.npz"

    def labels() -> None:
        save_array(folder, "y", _whole(nodes, "label"))
        kind = _whole(nodes, "node_types")
        for number, name in enumerate(("train", "val", "test"), 1):
            save_array(folder, name, (kind == number).nonzero()[0].astype(index_dtype(len(kind))))

    def features() -> None:
        with _member(nodes, "feature") as (shape, parts), _member(nodes, "label") as (labelled, _):
            write_table(folder, "x", (labelled[0], *shape[1:]), parts)

    def edges() -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        with _member(graph, "row") as (_, row), _member(graph, "col") as (_, col):
            yield from zip(row, col, strict=True)

    def write() -> None:
        with _member(nodes, "label") as (shape, _):
            write_edges(folder, shape[0], edges)

    return {"edges": write, "features": features, "labels": labels}


def _ogbn_products(folder: Path, raw: Path) -> Pieces:
    files, splits = raw / "products/raw", raw / "products/split/sales_ranking"

    def num_nodes() -> int:
        return int(next(_rows(files / "num-node-list.csv.gz", np.int64, 1))[0, 0])

    def labels() -> None:
        parts = list(_rows(files / "node-label.csv.gz", np.int64, 1))
        save_array(folder, "y", np.concatenate(parts)[:, 0].astype(np.int16))
        for name, file in (("train", "train"), ("val", "valid"), ("test", "test")):
            parts = list(_rows(splits / f"{file}.csv.gz", np.int64, 1))
            nodes = np.concatenate(parts)[:, 0]
            save_array(folder, name, nodes.astype(index_dtype(num_nodes())))

    def features() -> None:
        parts = _rows(files / "node-feat.csv.gz", np.float32, 128)
        first = next(parts)
        write_table(folder, "x", (num_nodes(), first.shape[1]), chain([first], parts))

    def edges() -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        for part in _rows(files / "edge.csv.gz", np.int64, 2):
            yield part[:, 0], part[:, 1]  # the file has each edge once, and it goes both ways
            yield part[:, 1], part[:, 0]

    return {
        "edges": lambda: write_edges(folder, num_nodes(), edges),
        "features": features,
        "labels": labels,
    }


SOURCES = {
    "reddit": Source("https://data.dgl.ai/dataset/reddit.zip", _reddit),
    "ogbn-products": Source(
        "http://snap.stanford.edu/ogb/data/nodeproppred/products.zip", _ogbn_products
    ),
}


def write_table(
    folder: Path, name: str, shape: tuple[int, ...], parts: Iterable[NDArray[Any]]
) -> None:
    """Write float32 rows as they come.

    Raises:
        ValueError: They are not as many as the shape says.
    """
    with whole_or_not(folder, name) as unfinished:
        create_array(folder, unfinished, shape, np.float32)
        written = 0
        for part in parts:
            if written + len(part) <= shape[0]:
                write_rows(folder, unfinished, written, part)
            written += len(part)
        if written != shape[0]:
            msg = f"{name} has {written} rows, not {shape[0]}"
            raise ValueError(msg)


@contextlib.contextmanager
def _member(file: Path, name: str) -> Iterator[tuple[tuple[int, ...], Iterator[NDArray[Any]]]]:
    """Open an array of an ``.npz`` file: its shape, and its rows in parts."""
    with zipfile.ZipFile(file) as archive, archive.open(f"{name}.npy") as stream:
        version = np.lib.format.read_magic(stream)
        reader = np.lib.format
        read = reader.read_array_header_1_0 if version[0] == 1 else reader.read_array_header_2_0
        shape, fortran, dtype = read(stream)
        if fortran and len(shape) > 1:
            msg = f"{name} in {file.name} is stored by columns"
            raise ValueError(msg)

        def parts() -> Iterator[NDArray[Any]]:
            width = math.prod(shape[1:])
            step = max(1, PART // max(1, width))
            for start in range(0, shape[0], step):
                rows = min(step, shape[0] - start)
                content = stream.read(rows * width * dtype.itemsize)
                yield np.frombuffer(content, dtype).reshape(rows, *shape[1:])

        yield shape, parts()


def _whole(file: Path, name: str) -> NDArray[Any]:
    with np.load(file) as arrays:
        array: NDArray[Any] = arrays[name]
    return array


def _rows(file: Path, dtype: type[np.generic], width: int) -> Iterator[NDArray[Any]]:
    """Read numbers that stand in lines, separated by commas, in parts.

    Args:
        file: Packed by gzip.
        dtype: Of the numbers.
        width: About how many there are in a line.
    """
    with gzip.open(file, "rt") as lines:
        while part := list(islice(lines, PART // width)):
            yield np.loadtxt(part, dtype=dtype, delimiter=",", ndmin=2)
