"""Inference over the whole graph against PyG on the whole graph, on real ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.workload_ranks import ROOT, free_port
from workloads.common.graph import Graph, finish_graph, open_graph, save_array, write_edges

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # PyG itself calls what torch has deprecated
    from workloads import sage

NODES = 131  # no multiple of any number of ranks below

# A rank: it computes its share and says which it was and what it found.
RANK = """
import json, os, sys, warnings
from datetime import timedelta
from pathlib import Path
warnings.simplefilter("ignore")
import torch
from toolkit.entrypoint import resolve
from workloads import sage
from workloads.common import inference
from workloads.common.graph import open_graph
from workloads.common.ranks import process_group

inference.ROWS, inference.COLUMNS = 16, 5
folder, shared = Path(sys.argv[1]), sys.argv[2] == "shared"
if sys.argv[2] == "unshareable" and os.environ["RANK"] == "3":
    inference.Path.readlink = lambda self: "another process"
with process_group(resolve(os.environ), "cpu", timedelta(seconds=60)) as ranks:
    graph = open_graph(folder)
    model = sage.SAGE([graph.num_features, 12, graph.num_classes], 0.5).eval()
    model.load_state_dict(torch.load(folder / "model.pt"))
    exchange = inference.Exchange(ranks, graph.num_nodes, shared=sys.argv[2] != "private")
    for _ in range(2):
        logits = model.infer(graph, exchange)
    accuracies = sage.evaluate(model, graph, ranks, exchange)
    tables = Path("/proc/self/maps").read_text().count("memfd:toolkit")
    (folder / f"{ranks.world.rank}.json").write_text(
        json.dumps([exchange.mine.start, logits.tolist(), accuracies, tables])
    )
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A graph with a hub and with nodes that have no neighbours, and a model."""
    folder = tmp_path_factory.mktemp("graph")
    random = np.random.default_rng(0)
    dense = random.random((NODES, NODES)) < 0.05
    dense[7], dense[NODES - 1], dense[0] = False, False, True
    target, source = dense.nonzero()
    write_edges(folder, NODES, lambda: [(source, target)])
    save_array(folder, "x", random.random((NODES, 9), dtype=np.float32))
    save_array(folder, "y", np.arange(NODES) % 4)
    shuffled = random.permutation(NODES)
    for name, nodes in (
        ("train", shuffled[:50]),
        ("val", shuffled[50:81]),
        ("test", shuffled[81:]),
    ):
        save_array(folder, name, np.sort(nodes))
    finish_graph(folder, 4)
    torch.manual_seed(0)
    torch.save(sage.SAGE([9, 12, 4], 0.5).state_dict(), folder / "model.pt")
    return folder


def whole_graph(folder: Path) -> tuple[Graph, torch.Tensor]:
    graph = open_graph(folder)
    model = sage.SAGE([9, 12, 4], 0.5).eval()
    model.load_state_dict(torch.load(folder / "model.pt"))
    first, second = model.layers
    targets = np.repeat(np.arange(NODES), np.diff(graph.indptr))
    edges = torch.from_numpy(np.stack([np.asarray(graph.indices, dtype=np.int64), targets]))
    with torch.no_grad():
        return graph, second(first(torch.from_numpy(np.array(graph.x)), edges).relu(), edges)


def start(folder: Path, nodes: list[int], local: list[int], how: str) -> list[list[object]]:
    """Start a rank for each entry: its machine, and its place there; in the order of the ranks."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "TOOLKIT_"))}
    port, size = str(free_port()), len(nodes)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(folder), how],
            cwd=ROOT,
            env={
                **environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_RANK": str(local[rank]),
                "LOCAL_WORLD_SIZE": str(nodes.count(nodes[rank])),
                "NODE_RANK": str(nodes[rank]),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
                "TOOLKIT_TARGET": "local",
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * size, said
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


@pytest.mark.parametrize(
    ("nodes", "local", "how", "tables"),
    [
        ([0], [0], "shared", [0]),
        ([0, 0, 0], [0, 1, 2], "shared", [1, 1, 1]),
        ([0, 0, 1, 1], [0, 1, 0, 1], "shared", [1, 1, 1, 1]),
        ([0, 1, 0, 1], [0, 0, 1, 1], "shared", [1, 1, 1, 1]),  # numbered across the machines
        ([0, 0, 1, 1], [0, 1, 0, 1], "private", [0, 0, 0, 0]),
        # Rank 3 cannot see the memory of its machine: none shares it, and all end alike.
        ([0, 0, 1, 1], [0, 1, 0, 1], "unshareable", [0, 0, 0, 0]),
    ],
)
def test_all_ranks_together_give_what_pyg_computes_on_the_whole_graph(
    folder: Path, nodes: list[int], local: list[int], how: str, tables: list[int]
) -> None:
    graph, expected = whole_graph(folder)
    parts = start(folder, nodes, local, how)
    covered: list[int] = []
    for first, logits, _, _ in parts:
        assert isinstance(first, int)
        found = torch.tensor(logits).view(-1, 4)
        torch.testing.assert_close(found, expected[first : first + len(found)])
        covered += range(first, first + len(found))
    assert sorted(covered) == list(range(NODES))
    right = (expected.argmax(dim=1).numpy() == graph.y).astype(float)
    for _, _, accuracies, _mapped in parts:
        assert accuracies == [right[graph.val].mean(), right[graph.test].mean()]
    assert [part[3] for part in parts] == tables
