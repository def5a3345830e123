"""What the scripts in ``ci/bench`` decide from what they measured."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

BENCH = Path(__file__).parents[2] / "ci" / "bench"


def load(name: str) -> Any:
    """A script as a module."""
    loader = SourceFileLoader(f"bench_{name}", str(BENCH / name))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module  # dataclasses look there
    loader.exec_module(module)
    return module


@pytest.fixture(scope="module", autouse=True)
def no_byte_code() -> Any:
    """Nothing is left beside the scripts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "dont_write_bytecode", True)
        yield


@pytest.mark.parametrize(
    ("toolkit", "plain", "off"),
    [
        ([1.0, 1.1, 9.0], [0.9, 1.0, 1.2, 1.1], ""),
        ([2.0, 2.1], [1.0, 2.2, 1.1], ""),  # the plain loop is as slow at times
        ([2.3, 2.3], [1.0, 2.2, 1.1], "SLOW"),
        ([0.5, 0.5], [1.0, 1.0, 1.0], "FAST"),  # too fast is wrong, too
    ],
)
def test_allreduce_agrees_within_the_noise_of_the_plain_loop(
    toolkit: Sequence[float], plain: Sequence[float], off: str
) -> None:
    assert load("allreduce").compare(toolkit, plain).off == off


@pytest.mark.parametrize(
    ("second", "agrees"),
    [
        ({("broadcast 64M", "SLOW")}, False),
        ({("broadcast 64M", "FAST"), ("broadcast 4M", "SLOW")}, True),
        (set(), True),
    ],
)
def test_allreduce_counts_what_is_off_twice_to_the_same_side(
    second: set[tuple[str, str]], monkeypatch: pytest.MonkeyPatch, *, agrees: bool
) -> None:
    bench = load("allreduce")
    found = iter([{("broadcast 64M", "SLOW"), ("all_reduce 1K", "FAST")}, second])
    monkeypatch.setattr(bench, "series", lambda *_: next(found))
    assert bench.measure("2 nodes", (), Path()) is agrees


def test_a_launch_is_slow_on_the_whole_where_all_its_rows_are() -> None:
    reference = {("all_reduce", 4): 1.0, ("broadcast", 4): 10.0}
    launches = [{("all_reduce", 4): 2.0, ("broadcast", 4): 20.0}, reference]
    assert load("allreduce").levels(launches, reference) == pytest.approx([2, 1])


def test_a_gpu_has_to_learn_what_a_cpu_does() -> None:
    agree = load("gpu").agree
    assert agree([1.5, 1.0], [1.505, 0.995], 0.01)
    assert not agree([1.5, 1.0], [1.5, 1.02], 0.01)
    assert not agree([1.5, 1.0], [1.5], 0.01)
    assert not agree([1.5], [float("nan")], 0.01)
    assert not agree([], [], 0.01)


def test_options_for_gpus_are_held_against_none_of_them() -> None:
    gpu = load("gpu")
    one, many = gpu.variants(1), gpu.variants(8)
    assert (one[0].ranks, one[0].options) == (1, ())
    assert [variant.ranks for variant in many] == [1, 1, 1, 1, 8]
    # Other batches learn otherwise; the same batches do not.
    assert [variant.tolerance for variant in many if variant.ranks > 1] == [None]
    assert all(variant.tolerance for variant in one)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_nothing_is_claimed() -> None:
    ran = subprocess.run(
        [sys.executable, BENCH / "gpu"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0
    assert ran.stdout.startswith("NOT RUN: no GPU is visible")
