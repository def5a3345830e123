"""``toolkit bench scale``: real runs at two sizes, and what is made of them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.errors import UsageError
from toolkit.scale import Size, node_counts, report, scaling, size_of

if TYPE_CHECKING:
    from pathlib import Path

COMMAND = (sys.executable, "-c", "from toolkit.commands.bench import app; app()", "scale")


def scale(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "--on", "local", *arguments]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=200, check=False
    )


def size(nodes: int, ranks: int, throughput: float, memory_mb: float | None = None) -> Size:
    return Size(nodes, ranks, throughput, "seeds/s", memory_mb, 9.5, f"runs/{nodes}", "slurm")


@given(st.lists(st.integers(1, 10_000), min_size=1))
def test_any_list_of_counts_is_read(counts: list[int]) -> None:
    assert node_counts(" , ".join(map(str, counts))) == sorted(set(counts))


@pytest.mark.parametrize("text", ["", "0", "1,", "1,x", "-1", "1-4", "2.5", "٣", "1 2"])
def test_what_is_no_list_of_counts(text: str) -> None:
    with pytest.raises(UsageError, match="is not a number of nodes"):
        node_counts(text)


def test_speed_up_and_efficiency_are_against_the_smallest_size() -> None:
    sizes = [size(1, 4, 1000), size(2, 8, 1900), size(8, 32, 4000)]
    assert scaling(sizes) == [(1, 1), (1.9, 0.95), (4, 0.5)]
    # The same ranks on more nodes: nothing was added, so the efficiency is the speed-up.
    assert scaling([size(2, 8, 1000), size(4, 8, 900)])[1] == (0.9, 0.9)


def test_the_table_shows_every_size_and_draws_the_efficiency() -> None:
    lines = report([size(1, 4, 1000, 812.4), size(2, 8, 1500)]).splitlines()
    assert lines[0].split() == [
        *("nodes", "ranks", "seeds/s", "speed-up", "efficiency", "MB", "a", "node", "seconds")
    ]
    assert lines[1].split() == ["1", "4", "1,000", "1.00", "100%", "812", "9.5", "#" * 20]
    assert lines[2].split() == ["2", "8", "1,500", "1.50", "75%", "-", "9.5", "#" * 15]
    assert len(lines) == 3


def result(**metrics: Any) -> dict[str, Any]:
    return {
        "num_nodes": 2,
        "world_size": 8,
        "run_dir": "runs/x",
        "target": "slurm",
        "started": 10.0,
        "ended": 12.5,
        "metrics": metrics,
    }


def test_what_a_run_reports() -> None:
    found = size_of(result(loss=1, images_per_second=7, peak_pss_mb_per_node=[5.5, 6.5]))
    assert found == Size(2, 8, 7.0, "images/s", 6.5, 2.5, "runs/x", "slurm")
    assert size_of(result(seeds_per_second=7)).memory_mb is None


def test_a_job_without_throughput_is_told_how_to_report_one() -> None:
    with pytest.raises(UsageError, match=r"reported no throughput.*metrics\.jsonl"):
        size_of(result(loss=1))


@pytest.mark.parametrize("value", [0, -1, None, "fast", True, [5], float("nan"), float("inf")])
def test_a_throughput_that_cannot_be_compared_is_named(value: object) -> None:
    with pytest.raises(UsageError, match=r"reported images_per_second .*a number above 0"):
        size_of(result(images_per_second=value))


@pytest.mark.parametrize("value", [5, [], ["much"], None])
def test_memory_that_is_no_list_of_numbers_is_left_out(value: object) -> None:
    assert size_of(result(images_per_second=1, peak_pss_mb_per_node=value)).memory_mb is None


def test_two_sizes_of_a_workload(tmp_path: Path) -> None:
    ran = scale(
        *(tmp_path, "--nodes", "2,1", "--json", "sage", "--dataset", "planted", "--epochs", "1"),
        *("--num-nodes", "400", "--num-edges", "4000", "--num-features", "8"),
        *("--num-classes", "4", "--hidden", "16", "--data-dir", str(tmp_path / "data")),
    )
    assert ran.returncode == 0, ran.stderr
    one, two = json.loads(ran.stdout)["sizes"]
    assert [(s["nodes"], s["ranks"]) for s in (one, two)] == [(1, 1), (2, 2)]
    assert one["efficiency"] == one["speed_up"] == 1
    assert two["speed_up"] == pytest.approx(two["throughput"] / one["throughput"])
    assert two["efficiency"] == pytest.approx(two["speed_up"] / 2)
    for found in (one, two):
        kept = json.loads((tmp_path / found["run_dir"] / "result.json").read_text())
        assert found["throughput"] == kept["metrics"]["seeds_per_second"]
        assert found["memory_mb"] == max(kept["metrics"]["peak_pss_mb_per_node"])


def test_a_command_of_ones_own_is_told_that_the_machine_is_shared(tmp_path: Path) -> None:
    line = '{"images_per_second": 50}'
    script = f"test $SLURM_PROCID = 1 || echo '{line}' > $TOOLKIT_RUN_DIR/metrics.jsonl"
    ran = scale(tmp_path, "--", "sh", "-c", script)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert [line.split()[:5] for line in lines[1:3]] == [
        ["1", "1", "50", "1.00", "100%"],
        ["2", "2", "50", "1.00", "50%"],
    ]
    assert "this one machine" in lines[3]


REPORT = "test $SLURM_PROCID = 0 && echo '{\"x_per_second\": 5}' > $TOOLKIT_RUN_DIR/metrics.jsonl"


def test_a_size_that_fails_ends_the_comparison_with_its_code(tmp_path: Path) -> None:
    ran = scale(tmp_path, "--nodes", "1,2", "--", "sh", "-c", "exit $((SLURM_NNODES + 4))")
    assert (ran.returncode, ran.stdout) == (5, "")
    assert "1 node ended with exit code 5; not tried: 2" in ran.stderr
    assert len(list((tmp_path / "runs").glob("*/result.json"))) == 2  # the run and `latest`


def test_what_was_measured_before_a_size_failed_is_not_lost(tmp_path: Path) -> None:
    command = ("--", "sh", "-c", f"[ $SLURM_NNODES -lt 2 ] || exit 9; {REPORT}")
    ran = scale(tmp_path, "--nodes", "1,2,3", *command)
    assert ran.returncode == 9
    assert [line.split()[:3] for line in ran.stdout.splitlines()[1:]] == [["1", "1", "5"]]
    assert "2 nodes ended with exit code 9; not tried: 3" in ran.stderr
    ran = scale(tmp_path, "--nodes", "1,2,3", "--json", *command)
    shown = json.loads(ran.stdout)
    assert (ran.returncode, shown["failed"]) == (9, {"nodes": 2, "exit_code": 9})
    assert [size["nodes"] for size in shown["sizes"]] == [1]


def test_what_was_measured_before_a_size_reported_nothing_is_not_lost(tmp_path: Path) -> None:
    command = ("--", "sh", "-c", f"[ $SLURM_NNODES -lt 2 ] || exit 0; {REPORT}")
    ran = scale(tmp_path, "--nodes", "1,2", *command)
    assert ran.returncode == 2
    assert [line.split()[:3] for line in ran.stdout.splitlines()[1:]] == [["1", "1", "5"]]
    assert "the job reported no throughput" in ran.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_the_run_in_order_and_shows_what_was_measured(
    tmp_path: Path, number: signal.Signals
) -> None:
    wait = f"{REPORT}; [ $SLURM_NNODES = 1 ] || {{ touch started; exec sleep 150; }}"
    command = [*COMMAND, "--on=local", "--nodes=1,2", "--", "sh", "-c", wait]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as ran:
        deadline = time.monotonic() + 60
        while not (tmp_path / "started").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        ran.send_signal(number)
        out, err = ran.communicate(timeout=60)
    assert ran.returncode == 130, err
    assert [line.split()[:3] for line in out.splitlines()[1:]] == [["1", "1", "5"]]
    # The run itself got to know: it ended its ranks and wrote how it ended.
    assert json.loads((tmp_path / "runs/latest/result.json").read_text())["exit_code"] == 130


def test_dry_run_prints_a_plan_for_each_size_and_starts_nothing(tmp_path: Path) -> None:
    ran = scale(tmp_path, "--nodes", "1,3", "--dry-run", "--", "true")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("#!/") == 2
    assert "node[0-2]" in ran.stdout
    assert list(tmp_path.iterdir()) == []
