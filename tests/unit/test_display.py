"""How a run is shown: plain lines, and the progress display of a terminal."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from toolkit.commands import display
from toolkit.run_dir import RunDir


def test_lines_of_ranks_stand_behind_their_names() -> None:
    stream = io.StringIO()
    with display.run_view(stream) as shown:
        shown.line("rank 1", "[bold]x[/bold] 100%")
    assert stream.getvalue() == "[rank 1] [bold]x[/bold] 100%\n"


def test_the_display_shows_what_the_workload_reports_as_it_comes(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=200)
    progress = Progress("{task.description}", "{task.percentage:.0f}%", console=console)
    with progress:
        live = display.LiveRun(progress)
        live.poll(run)  # nothing was reported yet
        first = {"epoch": 1, "epochs": 2, "step": 5, "steps": 10, "loss": 2.5}
        half = json.dumps({"epoch": 2, "step": 10, "loss": 1.25, "seeds_per_second": 1234.5})
        run.metrics_file.write_text(f"{json.dumps(first)}\nnot json\n{half[:20]}")
        live.poll(run)
        assert progress.tasks[0].percentage == 25
        assert "epoch 1/2  loss 2.500" in progress.tasks[0].description
        with run.metrics_file.open("a") as file:
            file.write(f"{half[20:]}\n")
        live.poll(run)
        assert progress.tasks[0].percentage == 100
        assert "loss 1.250  1,234 seeds/s" in progress.tasks[0].description
        live.line("rank 0", "[red]as it is[/red]")
    assert "[rank 0] [red]as it is[/red]" in screen.getvalue()


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ({}, (0, 0)),
        ({"epoch": 1}, (0, 0)),
        ({"epoch": "x", "epochs": 2}, (0, 0)),
        ({"epoch": 3, "epochs": 4}, (2, 4)),
        ({"epoch": 1, "epochs": 4, "step": 12, "steps": 10}, (10, 40)),
    ],
)
def test_progress_takes_what_a_users_own_workload_reports(
    seen: dict[str, object], expected: tuple[int, int]
) -> None:
    assert display.progress_of(seen) == expected
