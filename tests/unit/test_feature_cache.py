"""``workloads.common.feature_cache``: which nodes are kept, and that nothing else changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workloads.common import feature_cache
from workloads.common.feature_cache import FeatureCache, hottest, times_read

CPU = torch.device("cpu")


@given(st.data())
def test_rows_are_the_same_with_any_cache(data: st.DataObject) -> None:
    many, width = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 5))
    kind = data.draw(st.sampled_from([torch.float32, torch.float16, torch.uint8]))
    x = torch.arange(many * width).remainder(251).view(many, width).to(kind)
    node = st.integers(0, many - 1)
    cached = torch.tensor(data.draw(st.lists(node, unique=True)), dtype=torch.int64)
    nodes = torch.tensor(data.draw(st.lists(node)), dtype=torch.int64)
    got = FeatureCache(x, cached, CPU).gather(nodes)
    assert got.dtype == x.dtype
    assert torch.equal(got, x[nodes])


@given(st.lists(st.integers(0, 9)), st.integers(1, 4))
def test_every_edge_is_counted_in_any_chunks(indices: list[int], chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feature_cache, "CHUNK", chunk)
        count = times_read(torch.tensor(indices, dtype=torch.int32), 10)
    assert count.tolist() == [indices.count(node) for node in range(10)]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.integers(1, 9), st.integers(0, 200))
def test_the_most_read_nodes_fill_the_budget(count: list[int], row: int, budget: int) -> None:
    chosen = hottest(torch.tensor(count), row, budget).tolist()
    assert chosen == sorted(set(chosen))
    assert len(chosen) * row <= budget
    left = [count[node] for node in range(len(count)) if node not in chosen]
    assert all(count[node] > 0 for node in chosen)
    assert all(count[node] >= max(left, default=0) for node in chosen)
    # Another row would not fit, or nobody reads it.
    assert (len(chosen) + 1) * row > budget or not any(left)


def test_a_node_is_hot_where_others_read_it_and_not_where_it_reads_others() -> None:
    # Nodes 0 to 3 each have node 4 as their only neighbour, which itself has all of them.
    indices = torch.tensor([4, 4, 4, 4, 0, 1, 2, 3])
    assert hottest(times_read(indices, 5), 8, 8).tolist() == [4]


def test_what_is_cached_is_not_read_from_the_map() -> None:
    x = torch.zeros(6, 2)
    cache = FeatureCache(x, torch.tensor([1, 4]), CPU)
    x[:] = 7  # the map is another's from here on
    assert cache.gather(torch.tensor([4, 0, 1])).tolist() == [[0, 0], [7, 7], [0, 0]]
