"""The same job at several sizes, and how well it scales."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit import launch
from toolkit.common.process import Signals
from toolkit.entrypoint import codes
from toolkit.errors import ToolkitError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from toolkit.job import Job
    from toolkit.launch import View

BAR = 20  # characters for an efficiency of 1


@dataclass(frozen=True)
class Size:
    """A run at one size.

    Attributes:
        nodes: Number of nodes.
        ranks: Ranks in all.
        throughput: What the workload reported, in ``unit``.
        unit: Such as ``seeds/s``.
        memory_mb: The most that a node took (MB, PSS); None where the workload does not say.
        seconds: The whole run, from its start to its end.
        run_dir: Where it is kept.
        target: ``local``, ``slurm`` or ``docker``.
    """

    nodes: int
    ranks: int
    throughput: float
    unit: str
    memory_mb: float | None
    seconds: float
    run_dir: str
    target: str


def node_counts(text: str) -> list[int]:
    """Read ``1,2,4``; ascending, each once.

    Raises:
        UsageError: if one is no number of 1 or more.
    """
    parts = [part.strip() for part in text.split(",")]
    wrong = [part for part in parts if not (part.isascii() and part.isdecimal() and int(part))]
    if wrong:
        raise UsageError(f"--nodes {text}: {wrong[0]!r} is not a number of nodes, as in 1,2,4.")
    return sorted({int(part) for part in parts})


def measure(
    counts: Sequence[int],
    decide: Callable[[int], Job],
    view: Callable[[], AbstractContextManager[View]],
    say: Callable[[str], None],
) -> tuple[list[Size], int]:
    """Run the job at each size, one after the other, as long as they succeed.

    Args:
        counts: numbers of nodes.
        decide: gives the job for one of them.
        view: gives a view for each run.
        say: gets what the user should know.

    Returns:
        The sizes that were measured, and the exit code of the one that was not; 0 for none.
    """
    sizes: list[Size] = []
    with Signals() as signals:
        for number, count in enumerate(counts):
            say(f"size {number + 1} of {len(counts)}: {_nodes(count)}")
            try:
                result = launch.run(decide(count), view(), say)
                code = codes.CANCELLED if signals.caught else result["exit_code"]
                if not code:
                    sizes.append(size_of(result))
                    continue
                say(_ended(count, code, counts[number + 1 :]))
            except ToolkitError as error:
                say(str(error))
                code = error.exit_code
            return sizes, code
    return sizes, 0


def _nodes(count: int) -> str:
    return f"{count} node{'s' if count > 1 else ''}"


def size_of(result: Mapping[str, Any]) -> Size:
    """What a run's ``result.json`` says about its speed.

    Raises:
        UsageError: if the workload reported no throughput, or none that can be compared.
    """
    metrics = result["metrics"]
    name = next((key for key in metrics if key.endswith("_per_second")), "")
    throughput = metrics.get(name)
    # JSON as Python reads it has NaN and Infinity, too.
    if not _is_number(throughput) or not 0 < throughput < math.inf:
        found = f"reported {name} {throughput!r}" if name else "reported no throughput"
        msg = (
            f"{result['run_dir']}: the job {found}, so its scaling is unknown. Let rank 0 write a"
            ' line such as {"images_per_second": 1234}, a number above 0, to'
            " $TOOLKIT_RUN_DIR/metrics.jsonl."
        )
        raise UsageError(msg)
    memory = metrics.get("peak_pss_mb_per_node")
    if not isinstance(memory, list) or not all(map(_is_number, memory)):
        memory = None  # a key of the job's own that happens to have this name
    return Size(
        nodes=result["num_nodes"],
        ranks=result["world_size"],
        throughput=float(throughput),
        unit=f"{name.removesuffix('_per_second')}/s",
        memory_mb=max(memory) if memory else None,
        seconds=result["ended"] - result["started"],
        run_dir=result["run_dir"],
        target=result["target"],
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def scaling(sizes: Sequence[Size]) -> list[tuple[float, float]]:
    """Speed-up and efficiency of each size, against the first: what one of its ranks would give."""
    speed_up = [size.throughput / sizes[0].throughput for size in sizes]
    return [
        (up, up * sizes[0].ranks / size.ranks) for up, size in zip(speed_up, sizes, strict=True)
    ]


def report(sizes: Sequence[Size]) -> str:
    """The table, with the efficiency drawn."""
    head = ("nodes", "ranks", sizes[0].unit, "speed-up", "efficiency", "MB a node", "seconds")
    lines = ["{:>5} {:>6} {:>12} {:>9} {:>10} {:>10} {:>8}".format(*head)]
    for size, (up, efficiency) in zip(sizes, scaling(sizes), strict=True):
        memory = "-" if size.memory_mb is None else f"{size.memory_mb:,.0f}"
        bar = "#" * round(min(efficiency, 1.5) * BAR)
        lines.append(
            f"{size.nodes:5} {size.ranks:6} {size.throughput:12,.0f} {up:9.2f} {efficiency:10.0%} "
            f"{memory:>10} {size.seconds:8.1f}  {bar}"
        )
    if sizes[0].target == "local" and len(sizes) > 1:
        lines.append(
            "All nodes were this one machine and shared its cores, so this shows what the ranks"
            " cost each other, not how a cluster scales."
        )
    return "\n".join(lines)


def _ended(count: int, code: int, left: Sequence[int]) -> str:
    """What to say of a size that did not get to its end."""
    text = f"{_nodes(count)} ended with exit code {code}"
    return f"{text}; not tried: {', '.join(map(str, left))}" if left else text
