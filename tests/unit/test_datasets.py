from __future__ import annotations

import argparse
import contextlib
import gzip
import hashlib
import io
import itertools
import random
import tracemalloc
import warnings
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workloads.common.errors import WorkloadError
from workloads.common.graph import create_array, open_graph, write_edges, write_rows
from workloads.common.prepare import prepare
from workloads.datasets import debian, make_debian, planted, public

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # PyG itself calls what torch has deprecated
    import torch_geometric.data  # noqa: F401 - imported by public

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from workloads.common.graph import Graph


def stanza(name: str, section: str, **fields: str) -> str:
    fields = {"Filename": f"pool/main/{name}.deb", "Description": "a thing", **fields}
    lines = [f"Package: {name}", f"Section: {section}"]
    return "\n".join([*lines, *(f"{k.replace('_', '-')}: {v}" for k, v in fields.items() if v)])


# Three sections that count, one that is too small, one that is not in main.
INDEX = [
    *(stanza(f"lib{i}", "libs", Description="A C library") for i in range(10)),
    *(
        stanza(f"py{i}", "python", Depends="lib0", Recommends="lib1 | lib2 (>= 1)")
        for i in range(10)
    ),
    *(stanza(f"game{i}", "games") for i in range(9)),
    stanza(
        "game9",
        "games",
        Depends="lib1 (<< 2:3.4), py3:any,\n lib1, virtual-package | lib2 [amd64], game9",
        Pre_Depends="lib5",
        Suggests="lib6",
        Description="C++ game, a 2d game!\n whose long text does not count",
    ),
    *(stanza(f"rare{i}", "rare", Depends="lib0") for i in range(9)),
    *(stanza(f"closed{i}", "non-free/libs") for i in range(12)),
    stanza("installed-by-hand", "libs", Filename=""),
    stanza("lib9", "games", Filename="pool/main/a-version-that-sorts-first.deb"),
]


def make(stanzas: Sequence[str]) -> dict[str, NDArray[Any]]:
    return make_debian.make(io.StringIO("\n\n".join(stanzas) + "\n"))


def test_the_package_graph_of_a_known_index() -> None:
    arrays = make(INDEX)
    names = sorted([*(f"lib{i}" for i in range(10)), *(f"py{i}" for i in range(10))])
    names = sorted([*names, *(f"game{i}" for i in range(10))])
    assert arrays["classes"].tolist() == ["games", "libs", "python"]
    assert arrays["y"].tolist() == [
        ["game", "lib", "py"].index(n.rstrip("0123456789")) for n in names
    ]
    package, dependency = debian.ragged(arrays["edge_count"], arrays["edge_delta"])
    edges = {(names[a], names[b]) for a, b in zip(package, dependency, strict=True)}
    assert edges == {
        *((f"py{i}", f"lib{j}") for i in range(10) for j in (0, 1, 2)),
        *(("game9", other) for other in ("lib1", "lib2", "py3")),
    }
    node, word = debian.ragged(arrays["word_count"], arrays["word_delta"])
    assert set(word[node == names.index("game9")]) == make_debian.words("c++ game 2d")
    assert set(word[node == names.index("lib3")]) == make_debian.words("library")
    splits = [arrays[name].tolist() for name in ("train", "val", "test")]
    assert [len(split) for split in splits] == [15, 3, 12]
    assert sorted(itertools.chain(*splits)) == list(range(30))


def test_the_same_index_gives_the_same_bytes_in_any_order(tmp_path: Path) -> None:
    digests = set()
    for seed in range(3):
        stanzas = list(INDEX)
        random.Random(seed).shuffle(stanzas)
        np.savez_compressed(tmp_path / "data.npz", **make(stanzas))  # type: ignore[arg-type]
        digests.add(hashlib.sha256((tmp_path / "data.npz").read_bytes()).hexdigest())
    assert len(digests) == 1


def test_one_package_more_leaves_the_others_in_their_split() -> None:
    before, after = make(INDEX), make([*INDEX, stanza("zzz", "games")])
    moved = sum(len(set(before[k]) ^ set(after[k])) for k in ("train", "val", "test"))
    assert moved <= 5  # the new one, and one over each border between two splits


@pytest.fixture(scope="module")
def debian_graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    folder = tmp_path_factory.mktemp("debian")
    debian.build(folder)
    return open_graph(folder)


def test_the_shipped_graph_is_what_its_card_says(debian_graph: Graph) -> None:
    assert debian.FILE.stat().st_size < 5_000_000
    card = (Path(debian.__file__).parent / "DATA.md").read_text()
    assert hashlib.sha256(debian.FILE.read_bytes()).hexdigest() in card
    g = debian_graph
    assert (g.num_nodes, g.num_edges, g.num_classes) == (63_679, 548_846, 58)
    assert (len(g.train), len(g.val), len(g.test)) == (31_840, 6_368, 25_471)
    for number in (g.num_nodes, g.num_edges, len(g.train), len(g.val), len(g.test)):
        assert f"{number:,}" in card
    assert len(np.unique(np.concatenate([g.train, g.val, g.test]))) == g.num_nodes
    assert (g.x.shape, g.x.min(), g.x.max()) == ((63_679, 512), 0, 1)
    assert np.bincount(g.y).min() >= 10


def test_the_edges_of_the_shipped_graph_go_both_ways_once(debian_graph: Graph) -> None:
    g = debian_graph
    target = np.repeat(np.arange(g.num_nodes, dtype=np.int64), np.diff(g.indptr))
    there, back = target * g.num_nodes + g.indices, g.indices * np.int64(g.num_nodes) + target
    assert len(np.unique(there)) == len(there)
    assert (np.sort(there) == np.sort(back)).all()
    assert (target != g.indices).all()
    assert round(float((g.y[target] == g.y[g.indices]).mean()), 2) == 0.47


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    np.savez_compressed(folder / "small.npz", **make(INDEX))  # type: ignore[arg-type]
    return folder / "small.npz"


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_told_or_harmless(
    small: Path, tmp_path: Path, data: st.DataObject
) -> None:
    content = bytearray(small.read_bytes())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] ^= data.draw(st.integers(1, 255))
    damaged, folder, whole = tmp_path / "damaged.npz", tmp_path / "out", tmp_path / "whole"
    damaged.write_bytes(content)
    folder.mkdir(exist_ok=True)
    whole.mkdir(exist_ok=True)
    with contextlib.suppress(WorkloadError):
        debian.build(folder, damaged)
        # A zip file has fields, such as a date, that nobody reads.
        debian.build(whole, small)
        for name in ("indptr", "indices", "x", "y", "train", "val", "test"):
            assert (folder / f"{name}.npy").read_bytes() == (whole / f"{name}.npy").read_bytes()


@pytest.mark.parametrize("content", [b"", b"not a zip file", None])
def test_a_file_that_is_none_is_told(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "data.npz"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(WorkloadError, match=f"{file} is missing or damaged"):
        debian.build(tmp_path, file)


def test_a_file_without_an_array_is_told(small: Path, tmp_path: Path) -> None:
    file = tmp_path / "data.npz"
    with zipfile.ZipFile(small) as source, zipfile.ZipFile(file, "w") as target:
        for name in source.namelist():
            if name != "word_delta.npy":
                target.writestr(name, source.read(name))
    with pytest.raises(WorkloadError, match="word_delta"):
        debian.build(tmp_path, file)


def build_planted(folder: Path, shape: planted.Shape) -> None:
    """Make the graph in one process, the last piece first."""
    recipe = planted.recipe(shape, 1)
    recipe.build(folder)
    assert recipe.pieces
    for make in reversed(recipe.pieces(folder).values()):
        make()
    recipe.finish(folder)


SHAPE = planted.Shape(5_003, 200_001, 64, 7, 3)


@pytest.fixture(scope="module")
def planted_graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    folder = tmp_path_factory.mktemp("planted")
    build_planted(folder, SHAPE)
    return open_graph(folder)


def test_a_planted_graph_has_the_shape_asked_for(planted_graph: Graph) -> None:
    g = planted_graph
    assert (g.num_nodes, g.num_edges, g.num_features, g.num_classes) == (5_003, 200_001, 64, 7)
    assert (np.diff(g.indptr) >= 0).all()
    assert 0 <= g.indices.min() <= g.indices.max() < 5_003
    assert set(np.unique(g.y)) == set(range(7))
    nodes = np.concatenate([g.train, g.val, g.test])
    assert (np.sort(nodes) == np.arange(5_003)).all()
    assert (len(g.train), len(g.val)) == (2_501, 500)


def test_a_planted_graph_has_its_classes_and_hubs(planted_graph: Graph) -> None:
    g = planted_graph
    target = np.repeat(np.arange(g.num_nodes), np.diff(g.indptr))
    same = (g.y[target] == g.y[g.indices]).mean()
    assert abs(same - (planted.SAME + (1 - planted.SAME) / 7)) < 0.01
    heard = np.bincount(g.indices, minlength=g.num_nodes)
    assert heard.max() > 20 * heard.mean()
    assert np.diff(g.indptr).max() > 5 * np.diff(g.indptr).mean()


def test_the_classes_of_a_planted_graph_show_through_its_edges(planted_graph: Graph) -> None:
    g = planted_graph
    target = np.repeat(np.arange(g.num_nodes), np.diff(g.indptr))
    mean = np.zeros_like(g.x)
    np.add.at(mean, target, g.x[g.indices])
    mean /= np.maximum(1, np.diff(g.indptr))[:, None]

    def accuracy(x: NDArray[Any]) -> float:
        centre = np.stack([x[g.train][g.y[g.train] == c].mean(axis=0) for c in range(7)])
        distance = ((x[g.test][:, None] - centre) ** 2).sum(axis=2)
        return float((distance.argmin(axis=1) == g.y[g.test]).mean())

    assert accuracy(g.x) < 0.7
    assert accuracy(mean) > 0.85


def test_a_planted_graph_repeats_and_its_seed_counts(planted_graph: Graph, tmp_path: Path) -> None:
    build_planted(tmp_path, SHAPE)
    again = open_graph(tmp_path)
    assert (again.indices == planted_graph.indices).all()
    assert (again.x == planted_graph.x).all()
    other = planted.Shape(5_003, 200_001, 64, 7, 4)
    assert other.folder != SHAPE.folder
    build_planted(tmp_path, other)
    assert (open_graph(tmp_path).indices != planted_graph.indices).any()


def test_memory_does_not_grow_with_the_edges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planted, "PART", 1 << 16)
    peaks = []
    for num_edges in (500_000, 8_000_000):
        tracemalloc.start()
        build_planted(tmp_path, planted.Shape(20_000, num_edges, 10, 5, 0))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0] < 8_000_000  # 8 million edges are 32 MB on disk


@given(
    nodes=st.integers(10, 60), edges=st.integers(1, 500), features=st.integers(1, 5), data=st.data()
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_planted_graphs_of_any_size_open(
    tmp_path: Path, nodes: int, edges: int, features: int, data: st.DataObject
) -> None:
    classes = data.draw(st.integers(2, nodes // 2))
    build_planted(tmp_path, planted.Shape(nodes, edges, features, classes, 0))
    g = open_graph(tmp_path)
    assert (g.num_nodes, g.num_edges, g.num_features) == (nodes, edges, features)
    assert (np.diff(g.indptr) >= 0).all()
    assert 0 <= g.indices.min() <= g.indices.max() < nodes
    assert min(len(g.train), len(g.val), len(g.test)) > 0


@pytest.mark.parametrize(("nodes", "classes"), [(100, 51), (100, 1), (9, 2)])
def test_a_planted_graph_that_cannot_be_is_refused(nodes: int, classes: int) -> None:
    with pytest.raises(WorkloadError, match=rf"--num-nodes {nodes} --num-classes {classes}"):
        planted.Shape(nodes, 10, 3, classes, 0)


def test_rows_that_do_not_fit_an_array_are_an_error(tmp_path: Path) -> None:
    create_array(tmp_path, "x", (3, 2), np.float32)
    write_rows(tmp_path, "x", 1, np.ones((2, 2), dtype=np.int64))
    for start, shape in ((2, (2, 2)), (0, (1, 3)), (0, (2,))):
        with pytest.raises(RuntimeError, match=r"x\.npy is \(3, 2\)"):
            write_rows(tmp_path, "x", start, np.zeros(shape))
    assert np.load(tmp_path / "x.npy").tolist() == [[0, 0], [1, 1], [1, 1]]


# Sources and targets of a small graph, some edges twice, and a node without any.
EDGES = np.random.default_rng(0).integers(0, 20, size=(2, 151))


def assert_same_graph(g: Graph, edges: NDArray[Any], x: NDArray[Any]) -> None:
    """The neighbours of each node are those that the edges say, in their order."""
    for node in range(len(x)):
        heard = g.indices[g.indptr[node] : g.indptr[node + 1]]
        assert heard.tolist() == edges[0][edges[1] == node].tolist()
    assert (g.x == x.astype(np.float32)).all()
    assert (g.x.dtype.name, g.indices.dtype.name) == ("float32", "int32")


def make_public(name: str, root: Path, unpack: Callable[[Path], None]) -> Graph:
    """Make a public data set of which the raw files are already there."""
    recipe = public.recipe(name, 1)
    raw = root / f".{recipe.name}.part" / "raw"
    raw.mkdir(parents=True)
    unpack(raw)
    folder = prepare(root, recipe, timeout=10)
    assert sorted(path.suffix for path in folder.iterdir()) == [".json", *[".npy"] * 7]
    return open_graph(folder)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("part", [7, 1 << 21])
def test_reddit_is_read_from_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int, *, packed: bool
) -> None:
    monkeypatch.setattr(public, "PART", part)
    x = np.random.default_rng(1).random((21, 5))
    kind = np.arange(21) % 3 + 1

    def unpack(raw: Path) -> None:
        save = np.savez_compressed if packed else np.savez
        save(raw / "reddit_data.npz", feature=x, label=np.arange(21) % 4, node_types=kind)
        shape = np.array([21, 21])
        row, col = EDGES.astype(np.int32)
        save(raw / "reddit_graph.npz", row=row, col=col, data=np.ones(151), shape=shape)

    g = make_public("reddit", tmp_path, unpack)
    assert_same_graph(g, EDGES, x)
    assert (g.num_classes, g.y.tolist()) == (4, (np.arange(21) % 4).tolist())
    for number, nodes in enumerate((g.train, g.val, g.test), 1):
        assert nodes.tolist() == (kind == number).nonzero()[0].tolist()


@pytest.mark.parametrize("part", [300, 1 << 21])
def test_ogbn_products_is_read_from_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    monkeypatch.setattr(public, "PART", part)
    x = np.random.default_rng(1).random((21, 5)).astype(np.float32)

    def unpack(raw: Path) -> None:
        folder, splits = raw / "products/raw", raw / "products/split/sales_ranking"
        folder.mkdir(parents=True)
        splits.mkdir(parents=True)
        tables: dict[Path, NDArray[Any]] = {
            folder / "edge": EDGES.T,
            folder / "node-feat": x,
            folder / "node-label": (np.arange(21) % 4)[:, None],
            folder / "num-node-list": np.array([[21]]),
            splits / "train": np.arange(0, 10)[:, None],
            splits / "valid": np.arange(10, 15)[:, None],
            splits / "test": np.arange(15, 21)[:, None],
        }
        for path, table in tables.items():
            lines = "".join(",".join(map(repr, row.tolist())) + "\n" for row in table)
            path.with_name(f"{path.name}.csv.gz").write_bytes(gzip.compress(lines.encode()))

    g = make_public("ogbn-products", tmp_path, unpack)
    part_edges = [EDGES[:, i : i + part // 2] for i in range(0, 151, part // 2)]
    both = np.concatenate([np.concatenate([e, e[::-1]], axis=1) for e in part_edges], axis=1)
    assert_same_graph(g, both, x)
    assert (g.train.tolist(), g.val.tolist()) == (list(range(10)), list(range(10, 15)))
    assert (g.num_classes, len(g.test)) == (4, 6)


@pytest.mark.parametrize("damage", ["cut", "rows", "missing", "short", "beyond"])
def test_damaged_downloads_are_told_with_what_to_remove(tmp_path: Path, damage: str) -> None:
    def unpack(raw: Path) -> None:
        x = np.zeros((20 if damage == "rows" else 21, 5))
        more = {} if damage == "missing" else {"node_types": np.arange(21) % 3 + 1}
        save: Any = np.savez
        save(raw / "reddit_data.npz", feature=x, label=np.arange(21) % 4, **more)
        row, col = EDGES + (20 if damage == "beyond" else 0)
        np.savez(raw / "reddit_graph.npz", row=row[: 9 if damage == "short" else None], col=col)
        if damage == "cut":
            content = (raw / "reddit_graph.npz").read_bytes()
            (raw / "reddit_graph.npz").write_bytes(content[: len(content) // 2])

    with pytest.raises(WorkloadError, match=r"reddit: .* damaged .*remove .*\.reddit-v1\.part"):
        make_public("reddit", tmp_path, unpack)
    (left,) = tmp_path.iterdir()
    assert not [path for path in left.glob("*-*.npy") if path.stem.count("-")]


def test_memory_does_not_grow_with_what_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(public, "PART", 1 << 14)
    peaks = []
    for many in (100_000, 1_600_000):

        def edges(many: int = many) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
            random = np.random.default_rng(0)
            for _ in range(many // 16_000):
                yield random.integers(0, 500, 16_000), random.integers(0, 500, 16_000)

        tracemalloc.start()
        write_edges(tmp_path, 500, edges)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0] < 3_000_000


def test_a_download_that_fails_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens there
    with pytest.raises(WorkloadError, match=r"reddit could not be downloaded .*--data-dir"):
        public.recipe("reddit", 1).build(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_each_planted_shape_has_a_folder_of_its_own() -> None:
    from workloads import datasets  # noqa: PLC0415

    def folder(**changed: int) -> str:
        shape = {"num_nodes": 100, "num_edges": 10, "num_features": 3, "num_classes": 2}
        options = argparse.Namespace(dataset="planted", data_seed=0, **{**shape, **changed})
        return datasets.recipe(options).name

    names = [folder(), folder(num_nodes=101), folder(num_edges=11), folder(num_features=4)]
    names += [folder(num_classes=3)]
    assert len(set(names)) == len(names)
