from __future__ import annotations

import importlib.util
import itertools
import warnings
from collections import Counter
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workloads.common.sampler import PygLibSampler, TorchSampler, choose_neighbours, sampler_class

if TYPE_CHECKING:
    from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # PyG itself calls what torch has deprecated
    from torch_geometric.nn import SAGEConv

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")

SAMPLERS = [
    TorchSampler,
    pytest.param(
        PygLibSampler,
        marks=pytest.mark.skipif(
            importlib.util.find_spec("pyg_lib") is None, reason="pyg-lib is not installed"
        ),
    ),
]


def star(degree: int) -> tuple[Tensor, Tensor]:
    """A graph in which node 0 has ``degree`` neighbours, 1 and up, which have none."""
    indptr = torch.full((degree + 2,), degree)
    indptr[0] = 0
    return indptr, torch.arange(1, degree + 1, dtype=torch.int32)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@st.composite
def graphs(draw: st.DrawFn) -> list[list[int]]:
    """For each node the distinct nodes whose messages it receives."""
    size = draw(st.integers(1, 12))
    node = st.integers(0, size - 1)
    return draw(st.lists(st.lists(node, unique=True), min_size=size, max_size=size))


def pack(graph: list[list[int]]) -> tuple[Tensor, Tensor]:
    indptr = torch.tensor([0, *itertools.accumulate(len(row) for row in graph)])
    return indptr, torch.tensor(list(itertools.chain(*graph)), dtype=torch.int32)


@given(graph=graphs(), fanout=st.integers(1, 15), data=st.data())
def test_chosen_neighbours_are_real_distinct_and_as_many_as_asked(
    graph: list[list[int]], fanout: int, data: st.DataObject
) -> None:
    nodes = data.draw(st.lists(st.integers(0, len(graph) - 1)))
    offsets, chosen = choose_neighbours(
        *pack(graph), torch.tensor(nodes, dtype=torch.int64), fanout, generator(0)
    )
    assert len(offsets) == len(nodes) + 1
    assert offsets[-1] == len(chosen)
    for i, node in enumerate(nodes):
        row = chosen[offsets[i] : offsets[i + 1]].tolist()
        assert len(row) == len(set(row)) == min(fanout, len(graph[node]))
        assert set(row) <= set(graph[node])


@pytest.mark.parametrize(
    ("degree", "fanout"), [(2, 1), (5, 2), (5, 4), (6, 3), (7, 7), (3, 10), (11, 10)]
)
def test_every_set_of_neighbours_is_equally_likely(degree: int, fanout: int) -> None:
    draws = 60_000
    nodes = torch.zeros(draws, dtype=torch.int64)
    _, chosen = choose_neighbours(*star(degree), nodes, fanout, generator(degree * 100 + fanout))
    seen = Counter(tuple(sorted(row)) for row in chosen.view(draws, -1).tolist())
    sets = list(itertools.combinations(range(1, degree + 1), min(fanout, degree)))
    assert set(seen) == set(sets)
    expected = draws / len(sets)
    chi_square = sum((seen[one] - expected) ** 2 / expected for one in sets)
    # Mean and standard deviation of chi-square are k and sqrt(2k): six deviations above the mean.
    freedom = len(sets) - 1
    assert chi_square <= freedom + 6 * (2 * freedom) ** 0.5


@pytest.mark.parametrize(("degree", "fanout"), [(12, 5), (100, 10), (1000, 25), (26, 25), (9, 25)])
def test_each_neighbour_is_included_with_probability_fanout_over_degree(
    degree: int, fanout: int
) -> None:
    draws = 4_000_000 // (degree * 4)
    nodes = torch.zeros(draws, dtype=torch.int64)
    _, chosen = choose_neighbours(*star(degree), nodes, fanout, generator(degree + fanout))
    count = torch.bincount(chosen, minlength=degree + 1)[1:].double()
    p = min(1.0, fanout / degree)
    deviation = (draws * p * (1 - p)) ** 0.5
    # Five deviations for each neighbour, and the first must not differ from the last.
    assert (count - draws * p).abs().max() <= 5 * deviation
    assert abs(count[: degree // 2].mean() - count[-(degree // 2) :].mean()) <= 5 * deviation


def test_neighbours_beyond_the_precision_of_float32_are_drawn() -> None:
    degree = 2**25  # a float32 in [0, 1) times this is even
    indptr = torch.tensor([0, degree])
    indices = torch.arange(degree, dtype=torch.int32)
    nodes = torch.zeros(50, dtype=torch.int64)
    _, chosen = choose_neighbours(indptr, indices, nodes, 10, generator(0))
    assert 150 < int((chosen % 2).sum()) < 350
    assert chosen.max() > degree * 0.95


@pytest.mark.parametrize("sampler", SAMPLERS)
@settings(deadline=None)
@given(graph=graphs(), fanout=st.lists(st.integers(1, 4), max_size=3), data=st.data())
def test_a_batch_holds_edges_of_the_graph_and_layers_that_fit(
    sampler: type[TorchSampler | PygLibSampler],
    graph: list[list[int]],
    fanout: list[int],
    data: st.DataObject,
) -> None:
    whole = sampler(*pack(graph), fanout, 0)
    for _ in range(2):  # what one batch leaves behind must not show in the next
        nodes = st.lists(st.integers(0, len(graph) - 1), unique=True, min_size=1)
        seeds = torch.tensor(data.draw(nodes))
        batch = whole.sample(seeds)
        assert batch.nodes[: len(seeds)].tolist() == seeds.tolist()
        assert len(batch.nodes.unique()) == len(batch.nodes)  # type: ignore[no-untyped-call]
        sizes = [tuple(matrix.shape) for matrix in batch.adjacency]
        assert [a[0] for a in sizes[:-1]] == [b[1] for b in sizes[1:]]
        assert len(batch.nodes) == (sizes[0][1] if sizes else len(seeds))
        assert not sizes or sizes[-1][0] == len(seeds)
        for matrix, limit in zip(batch.adjacency, reversed(fanout), strict=True):
            rows = matrix.crow_indices()
            for i in range(matrix.size(0)):
                sources = batch.nodes[matrix.col_indices()[rows[i] : rows[i + 1]]].tolist()
                wanted = graph[int(batch.nodes[i])]
                assert set(sources) <= set(wanted)
                assert len(set(sources)) == len(sources) == min(limit, len(wanted))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_all_neighbours_give_what_pyg_computes_on_the_whole_graph(
    sampler: type[TorchSampler | PygLibSampler],
) -> None:
    torch.manual_seed(1)
    size = 60
    dense = torch.rand(size, size) < 0.1
    dense[:, 7] = False  # a node that nobody hears
    dense[9] = False  # and one that hears nobody
    target, source = dense.nonzero(as_tuple=True)
    indptr = torch.zeros(size + 1, dtype=torch.int64)
    torch.cumsum(dense.sum(dim=1), dim=0, out=indptr[1:])
    x = torch.randn(size, 5)
    first, second = SAGEConv(5, 8), SAGEConv(8, 3)
    edge_index = torch.stack([source, target])
    expected = second(first(x, edge_index).relu(), edge_index)

    seeds = torch.tensor([9, 3, 7, 59, 0])
    batch = sampler(indptr, source.int(), [size, size], 0).sample(seeds)
    hidden = x[batch.nodes]
    for layer, matrix in zip((first, second), batch.adjacency, strict=True):
        hidden = layer((hidden, hidden[: matrix.size(0)]), matrix)
        hidden = hidden.relu() if layer is first else hidden
    torch.testing.assert_close(hidden, expected[seeds])


def test_sampling_repeats_with_its_seed_whatever_else_draws() -> None:
    graph, seeds = star(500), torch.tensor([0])
    batches: list[list[list[int]]] = []
    for seed in (3, 3, 4):
        sampler = TorchSampler(*graph, [20], seed)
        drawn = [sampler.sample(seeds).nodes.tolist()]
        torch.rand(len(batches))  # as dropout does meanwhile
        drawn.append(sampler.sample(seeds).nodes.tolist())
        batches.append(drawn)
    assert batches[0] == batches[1] != batches[2]
    assert batches[0][0] != batches[0][1]


def test_the_plain_sampler_is_taken_where_pyg_lib_is_missing() -> None:
    installed = importlib.util.find_spec("pyg_lib") is not None
    assert sampler_class("auto") is (PygLibSampler if installed else TorchSampler)
    assert sampler_class("torch") is TorchSampler
