"""``toolkit bench scale``: the same job at several sizes, and how well it scales."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.commands import view
from toolkit.commands.options import (
    EXPLICIT_COMMAND,
    JOB_OPTIONS,
    Cluster,
    DryRun,
    JobCommand,
    Json,
    Words,
    with_job_options,
)
from toolkit.common.process import Signals, exit_code
from toolkit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

app = typer.Typer(help="Measure how a job scales.", no_args_is_help=True, add_completion=False)

TOOLKIT = (sys.executable, "-P", "-c", "from toolkit.cli import main; main()")
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


def flags(options: Mapping[str, Any]) -> list[str]:
    """The options of ``toolkit run`` as it takes them."""
    found = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            values = value if isinstance(value, list) else [value]
            found += [f"--{flag}={one}" for one in values]
    return found


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


def scale(
    ctx: typer.Context,
    *,
    options: dict[str, Any],
    words: Words = None,
    cluster: Cluster = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Run the same job on 1, 2, 4 … nodes, one after the other, and compare.

    Shown are throughput, speed-up and efficiency against the smallest size, and memory. The job is
    given as to `toolkit run`; its workload has to report a throughput (NAME_per_second). Where a
    size fails, the ones before it are shown, and its exit code is the command's own.
    """
    counts = node_counts(options.pop("nodes") or "1,2")
    common = flags({**options, "cluster": cluster})
    job = ["--", *words] if words and ctx.meta[EXPLICIT_COMMAND] else words or []
    sizes: list[Size] = []
    failed = None
    for number, count in enumerate(counts):
        command = [*TOOLKIT, "run", f"--nodes={count}", *common]
        if dry_run:
            code = subprocess.run([*command, "--dry-run", *job], check=False).returncode
            if code:
                raise typer.Exit(code)
            continue
        view.message(f"size {number + 1} of {len(counts)}: {count} node{'s' if count > 1 else ''}")
        code, said = _run([*command, "--json", *job])
        if code:
            failed = {"nodes": count, "exit_code": code}
            view.message(_ended(count, code, counts[number + 1 :]))
            break
        try:
            sizes.append(size_of(json.loads(said)))
        except UsageError as error:
            failed = {"nodes": count, "exit_code": error.exit_code}
            view.message(str(error))
            break
    if dry_run:
        return
    if as_json:
        shown = [
            {**asdict(size), "speed_up": up, "efficiency": efficiency}
            for size, (up, efficiency) in zip(sizes, scaling(sizes), strict=True)
        ]
        print(json.dumps({"sizes": shown, "failed": failed}))
    elif sizes:
        print(report(sizes))
    if failed:
        raise typer.Exit(failed["exit_code"])


def _run(command: Sequence[str]) -> tuple[int, bytes]:
    """Run one size to its end, Ctrl-C included: it has a job to cancel.

    Returns:
        Its exit code and what it printed on stdout.
    """
    with (
        Signals() as signals,
        subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process,
    ):
        passed_on = False
        while True:
            try:
                said, _ = process.communicate(timeout=0.2)
                return exit_code(process), said
            except subprocess.TimeoutExpired:
                if signals.caught and not passed_on:
                    process.send_signal(signals.caught)
                    passed_on = True


def _ended(count: int, code: int, left: Sequence[int]) -> str:
    """What to say of a size that did not get to its end."""
    text = f"{count} node{'s' if count > 1 else ''} ended with exit code {code}"
    return f"{text}; not tried: {', '.join(map(str, left))}" if left else text


@app.callback()
def _bench() -> None:
    """Measure how a job scales."""


_NODES = Annotated[
    str | None,
    typer.Option("-N", "--nodes", help="Such as 1,2,4 [default: 1,2]."),
]
app.command("scale", cls=JobCommand, context_settings={"allow_interspersed_args": False})(
    with_job_options(scale, {**JOB_OPTIONS, "nodes": _NODES})
)
