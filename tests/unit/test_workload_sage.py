"""``workloads.sage`` as a user meets it: real ranks, real data, real failures."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from tests.unit.workload_ranks import ROOT, Result, free_port, read_metrics, run_ranks
from workloads.common.errors import WorkloadError
from workloads.common.graph import Graph, open_graph

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # PyG itself calls what torch has deprecated
    from torch_geometric.data import Data
    from torch_geometric.loader import NeighborLoader
    from torch_geometric.nn import SAGEConv

    from workloads import sage

if TYPE_CHECKING:
    from collections.abc import Sequence

SMALL = [
    *("sage", "--dataset", "planted", "--num-nodes", "400", "--num-edges", "4000"),
    *("--num-features", "8", "--num-classes", "4", "--epochs", "1", "--hidden", "16"),
]
# Five nodes to train with, one for validation: fewer than there are ranks.
TINY = [
    *("sage", "--dataset", "planted", "--num-nodes", "10", "--num-edges", "40"),
    *("--num-features", "4", "--num-classes", "2", "--epochs", "1"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


def assert_ended_clearly(result: Result, code: int, *texts: str) -> None:
    """All ranks ended with ``code``; the first to end said why, in one paragraph."""
    assert result.codes == [code] * len(result.codes), result.err
    first = min(range(len(result.ended)), key=result.ended.__getitem__)
    for text in texts:
        assert text in result.err[first]
    assert len(result.err[first].strip().splitlines()) == 1
    assert not any("Traceback" in err for err in result.err)


def train_debian(
    model: str, data: Path, folder: Path, *options: str
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Train as a user does: the main job, on two "nodes" of two ranks."""
    folder.mkdir()
    toolkit = Path(sys.executable).with_name("toolkit")
    run = ("run", "--on", "local", "--nodes", "2", "--ntasks-per-node", "2", "--json")
    workload = ("sage", "--model", model, "--data-dir", str(data), *options)
    ran = subprocess.run(
        [toolkit, *run, *workload], cwd=folder, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert all(line.startswith(("toolkit: ", "[rank 0] ")) for line in ran.stderr.splitlines())
    result = json.loads(ran.stdout)
    assert (result["world_size"], result["num_nodes"], result["failure"]) == (4, 2, None)
    lines, _ = read_metrics(folder / "runs/latest")
    return lines, result["metrics"]


def test_debian_is_learnt_by_its_edges(data: Path, tmp_path: Path) -> None:
    lines, with_edges = train_debian("sage", data, tmp_path / "sage")
    _, without = train_debian("mlp", data, tmp_path / "mlp")
    assert with_edges["test_accuracy"] >= 0.75
    assert with_edges["test_accuracy"] >= without["test_accuracy"] + 0.12
    assert (with_edges["dataset"], with_edges["model"]) == ("debian", "sage")
    assert with_edges["world_size"] == 4
    assert with_edges["epochs"] == len(with_edges["losses"]) == 8
    assert with_edges["loss"] == with_edges["losses"][-1] < with_edges["losses"][0]
    assert len(with_edges["peak_pss_mb_per_node"]) == 2
    assert all(200 < mb < 3000 for mb in with_edges["peak_pss_mb_per_node"])
    # For a progress display: steps while training, and one line with accuracies an epoch.
    assert {"epoch", "epochs", "step", "steps", "loss", "seeds_per_second"} in [
        set(line) for line in lines
    ]
    accuracies = [line for line in lines[:-1] if "val_accuracy" in line]
    assert [line["epoch"] for line in accuracies] == list(range(1, 9))
    assert all("train_accuracy" in line for line in accuracies)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("dtype", [np.float32, np.uint8, np.float64])
def test_a_batch_of_all_neighbours_gives_what_pyg_computes_on_the_whole_graph(
    dtype: type[Any],
) -> None:
    random = np.random.default_rng(0)
    size = 50
    dense = random.random((size, size)) < 0.1
    dense[7] = False  # a node without neighbours
    target, source = dense.nonzero()
    nodes = np.arange(size)
    graph = Graph(
        indptr=np.concatenate([[0], dense.sum(axis=1).cumsum()]),
        indices=source.astype(np.int32),
        x=random.integers(9, size=(size, 6)).astype(dtype),
        y=nodes % 3,
        train=nodes,
        val=nodes,
        test=nodes,
        num_classes=3,
    )
    options = sage.parse(["--sampler", "torch", "--fanout", f"{size},{size}"])
    torch.manual_seed(0)
    model = sage.SAGE([6, 8, 3], 0.5).eval()
    first, second = model.layers
    edges = torch.from_numpy(np.stack([source, target]))
    expected = second(first(torch.from_numpy(graph.x).float(), edges).relu(), edges)

    batches = sage.Batches(graph, options, torch.device("cpu"), 0)
    parts = torch.randperm(size).split([20, 1, 29])  # type: ignore[no-untyped-call]
    loaded = list(batches.ahead(parts))
    assert len(loaded) == len(parts)
    for part, (inputs, y) in zip(parts, loaded, strict=True):
        torch.testing.assert_close(model(inputs), expected[part])
        assert y.tolist() == (part % 3).tolist()


def test_a_run_repeats_with_its_seed(data: Path, tmp_path: Path) -> None:
    weights = []
    for i, seed in enumerate((1, 1, 2)):
        folder = tmp_path / str(i)
        arguments = [*SMALL, "--data-dir", str(data), "--seed", str(seed), "--epochs", "2"]
        result = run_ranks(1, 2, arguments, folder=folder, environ={"TOOLKIT_RUN_DIR": str(folder)})
        assert result.codes == [0, 0], result.err
        weights.append(read_metrics(folder)[1]["weights_sha256"])
    assert weights[0] == weights[1] != weights[2]


@pytest.mark.parametrize(
    ("option", "tolerance"),
    [
        (("--feature-cache", "1"), 0.0),
        (("--bf16",), 0.02),
        pytest.param(
            ("--compile",),
            1e-4,
            marks=pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs g++"),
        ),
    ],
)
def test_what_is_meant_for_gpus_learns_the_same(
    option: tuple[str, ...], tolerance: float, data: Path, tmp_path: Path
) -> None:
    found = []
    for name, more in (("with", option), ("without", ())):
        folder = tmp_path / name
        arguments = [*SMALL, "--epochs", "2", "--data-dir", str(data), *more]
        result = run_ranks(1, 2, arguments, folder=folder, environ={"TOOLKIT_RUN_DIR": str(folder)})
        assert result.codes == [0, 0], result.err
        found.append(read_metrics(folder)[1])
    assert found[0]["losses"] == pytest.approx(found[1]["losses"], rel=tolerance, abs=0)
    assert all(0 <= metrics["data_wait_share"] < 1 for metrics in found)


@pytest.mark.skipif(find_spec("pyg_lib") is None, reason="pyg-lib is not installed")
def test_pyg_lib_reaches_the_same_accuracy(data: Path, tmp_path: Path) -> None:
    accuracy = [
        train_debian("sage", data, tmp_path / sampler, "--sampler", sampler)[1]["test_accuracy"]
        for sampler in ("torch", "pyg-lib")
    ]
    assert abs(accuracy[0] - accuracy[1]) < 0.01


@pytest.mark.filterwarnings("ignore")  # PyG's and torch-sparse's own
@pytest.mark.skipif(find_spec("torch_sparse") is None, reason="torch-sparse is not installed")
def test_torch_sparse_reaches_the_same_accuracy(data: Path, tmp_path: Path) -> None:
    """The same budget by PyG's own NeighborLoader, which samples with torch-sparse."""
    _, ours = train_debian("sage", data, tmp_path / "run")
    graph = open_graph(next(data.glob("debian-*")))
    theirs = train_with_neighbor_loader(graph, ours["epochs"])
    assert abs(ours["test_accuracy"] - theirs) < 0.015


def train_with_neighbor_loader(graph: Graph, epochs: int) -> float:
    """The test accuracy of two SAGEConv layers, with sage's defaults, in one process."""
    targets = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr))
    edges = np.stack([np.asarray(graph.indices, dtype=np.int64), targets])
    whole = Data(
        torch.from_numpy(np.array(graph.x)).float(),
        torch.from_numpy(edges),
        y=torch.from_numpy(np.array(graph.y)).long(),
    )

    def loader(nodes: Any, *, shuffle: bool) -> Any:
        seeds = torch.from_numpy(np.array(nodes)).long()
        return NeighborLoader(whole, [10, 10], seeds, batch_size=1024, shuffle=shuffle)

    torch.manual_seed(0)
    first, second = SAGEConv(graph.num_features, 256), SAGEConv(256, graph.num_classes)
    model = torch.nn.ModuleList([first, second])
    optimizer = torch.optim.Adam(model.parameters(), lr=6e-3)
    batches = loader(graph.train, shuffle=True)
    steps = len(batches)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min(1, (n + 1) / steps) * (1 - n / (steps * epochs))
    )

    def logits(batch: Any) -> torch.Tensor:
        hidden = functional.dropout(
            first(batch.x, batch.edge_index).relu(), 0.5, training=model.training
        )
        out: torch.Tensor = second(hidden, batch.edge_index)
        return out[: batch.batch_size]

    for _ in range(epochs):
        model.train()
        for batch in batches:
            optimizer.zero_grad()
            loss = functional.cross_entropy(logits(batch), batch.y[: batch.batch_size])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    model.eval()
    hits = count = 0
    with torch.no_grad():
        for batch in loader(graph.test, shuffle=False):
            hits += int((logits(batch).argmax(1) == batch.y[: batch.batch_size]).sum())
            count += batch.batch_size
    return hits / count


def test_case_10_1_a_training_set_that_does_not_divide(data: Path, tmp_path: Path) -> None:
    result = run_ranks(
        *(1, 4),
        [
            *("sage", "--dataset", "planted", "--num-nodes", "8195", "--num-edges", "30000"),
            *("--num-features", "4", "--num-classes", "3", "--hidden", "8", "--epochs", "2"),
            *("--batch-size", "1000", "--data-dir", str(data)),
        ],
        folder=tmp_path,
        environ={"TOOLKIT_RUN_DIR": str(tmp_path)},
    )
    assert result.codes == [0] * 4, result.err
    # 4097 training nodes: 1024 on each rank, in a step of 1000 and one of 24.
    assert "2 steps an epoch" in result.out[0]
    assert "1 of 4097 training nodes dropped" in result.out[0]
    _, metrics = read_metrics(tmp_path)
    # An accuracy is a count over all nodes of a split: not one was left out or counted twice.
    for name, nodes in (("val_accuracy", 820), ("test_accuracy", 3278), ("train_accuracy", 4096)):
        hits = metrics[name] * nodes
        assert hits == pytest.approx(round(hits), abs=1e-6)
        assert 0 < hits < nodes


def test_case_10_1_more_ranks_than_training_nodes(tmp_path: Path) -> None:
    result = run_ranks(
        *(1, 6),
        [*TINY, "--data-dir", str(tmp_path / "data")],
        folder=tmp_path,
        environ={"TOOLKIT_RUN_DIR": str(tmp_path)},
    )
    assert_ended_clearly(result, 2, "world size 6, but planted has 5 training nodes")
    assert result.err[1:] == [""] * 5
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("storage", ["shared", "node-local"])
def test_case_10_2_data_is_prepared_once_for_each_storage(tmp_path: Path, storage: str) -> None:
    roots = [tmp_path / "node0", tmp_path / ("node0" if storage == "shared" else "node1")]
    result = run_ranks(
        *(2, 2),
        SMALL,
        folder=tmp_path / "logs",
        by_node=[{"TOOLKIT_DATA": str(root)} for root in roots],
    )
    assert result.codes == [0] * 4, result.err
    for root in roots:
        (folder,) = root.iterdir()  # no lock, no temporary folder
        assert folder.name.startswith("planted-n400-")


def test_case_10_2_a_writer_that_fails_ends_all_ranks_with_its_message(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run_ranks(
        *(2, 2),
        SMALL,
        folder=tmp_path / "logs",
        by_node=[
            {"TOOLKIT_DATA": str(tmp_path / "node0")},
            {"TOOLKIT_DATA": str(tmp_path / "file")},
        ],
    )
    assert_ended_clearly(result, 2, "cannot prepare the data set", str(tmp_path / "file"))
    assert "rank 2 ended the run" not in result.err[2]
    for rank in (0, 1, 3):
        assert "rank 2 ended the run: cannot prepare the data set" in result.err[rank]


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """The copy of the workloads that a run directory holds."""
    lib = tmp_path / "run" / "lib"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "workloads", lib / "workloads", ignore=ignored)
    shutil.copytree(ROOT / "toolkit/entrypoint", lib / "toolkit/entrypoint", ignore=ignored)
    shutil.copy(ROOT / "toolkit/__init__.py", lib / "toolkit/__init__.py")
    return lib


def test_a_copy_runs_beside_folders_of_the_user_with_our_names(
    library: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    for name in ("toolkit", "workloads"):
        (home / name).mkdir(parents=True)
        (home / name / "__init__.py").write_text("raise SystemExit('the wrong one')\n")
    result = run_ranks(
        *(1, 2),
        [*SMALL, "--data-dir", str(tmp_path / "data")],
        folder=tmp_path / "logs",
        workloads=library / "workloads",
        cwd=home,
        # A file as the place to meet, for machines where a port cannot be had.
        environ={"PYTHONPATH": str(home), "TOOLKIT_INIT_METHOD": f"file://{tmp_path / 'meet'}"},
    )
    assert result.codes == [0, 0], result.err
    assert "world size 2" in result.out[0]


def test_a_damaged_data_set_file_ends_all_ranks(library: Path, tmp_path: Path) -> None:
    file = library / "workloads/datasets/files/debian12.npz"
    file.write_bytes(file.read_bytes()[:500_000])
    result = run_ranks(
        *(1, 2),
        ["sage", "--data-dir", str(tmp_path / "data")],
        folder=tmp_path / "logs",
        workloads=library / "workloads",
    )
    assert_ended_clearly(result, 2, str(file), "missing or damaged")
    assert list((tmp_path / "data").iterdir()) == []


def test_damaged_arrays_end_all_ranks(tmp_path: Path) -> None:
    arguments = [*SMALL, "--data-seed", "7", "--data-dir", str(tmp_path / "data")]
    assert run_ranks(1, 1, arguments, folder=tmp_path / "first").codes == [0]
    (folder,) = (tmp_path / "data").iterdir()
    x = folder / "x.npy"
    os.truncate(x, x.stat().st_size // 2)
    result = run_ranks(1, 2, arguments, folder=tmp_path / "second")
    assert_ended_clearly(result, 2, f"{folder} is damaged", "remove that folder")


def test_torchrun_starts_it_too(data: Path, tmp_path: Path) -> None:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "TOOLKIT_"))}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"),
            *(f"--master-port={free_port()}", "-m", "workloads", *TINY, "--data-dir", str(data)),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**environ, "GLOO_SOCKET_IFNAME": "lo", "TOOLKIT_RUN_DIR": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert read_metrics(tmp_path)[1]["world_size"] == 2


def start(*arguments: str, python: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *python, str(ROOT / "workloads"), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("arguments", [["sagee"], [], ["__main__"], ["common"], ["../x"], [""]])
def test_an_unknown_workload_is_answered_with_the_known_ones(arguments: list[str]) -> None:
    done = start(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.endswith("there is: allreduce, fashion_mnist, sage\n")
    assert all(repr(argument) in done.stderr for argument in arguments)


def test_no_torch_is_said_in_one_paragraph() -> None:
    done = start("sage", python=["-S"])  # -S: without installed packages
    assert (done.returncode, done.stdout) == (78, "")
    assert len(done.stderr.splitlines()) == 1
    assert "has no numpy and no torch and no torch_geometric" in done.stderr
    assert sys.executable in done.stderr


def test_a_wrong_option_is_said_once(tmp_path: Path) -> None:
    result = run_ranks(1, 2, ["sage", "--epochs", "0"], folder=tmp_path)
    assert_ended_clearly(result, 2, "--epochs", "'0' is not an integer of 1 or more", "--help")
    assert result.err[1] == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--dataset", "cora"], "'cora'"),
        (["--epochs", "two"], "'two' is not an integer"),
        (["--batch-size", "-1"], "'-1' is not an integer of 1 or more"),
        (["--fanout", "10,,5"], "'' is not an integer"),
        (["--fanout", "10,0"], "'0' is not an integer of 1 or more"),
        (["--lr", "nan"], "'nan' is not a number above 0"),
        (["--lr", "inf"], "'inf' is not a number above 0"),
        (["--dropout", "1"], "'1' is not a number from 0 to below 1"),
        (["--data-timeout", "0"], "'0' is not a number above 0"),
        (["--num-edges", "1" + "0" * 30], "is too large"),
        (["--seed", "-5"], "'-5' is not an integer of 0 or more"),
        (["--data-seed", "1e3"], "'1e3' is not an integer of 0 or more"),
        (["--device", "tpu"], "'tpu'"),
        (["--feature-cache", "-1"], "'-1' is not an integer of 0 or more"),
        (["--feature-cache", "256M"], "'256M' is not an integer"),
        (["--bf16", "yes"], "yes"),
        (["--epoch", "3", "--ep"], "--ep"),
        (["--nodes", "2"], "--nodes"),
        (["extra"], "extra"),
    ],
)
def test_wrong_options(arguments: list[str], text: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        sage.parse(arguments)
    assert caught.value.exit_code == 2
    assert text in str(caught.value)


def test_defaults_are_those_of_the_acceptance_run() -> None:
    options = sage.parse([])
    assert (options.dataset, options.model) == ("debian", "sage")
    assert options.data_timeout >= 90
    assert np.prod(options.fanout) <= 150
