"""How fast the ranks exchange data: what to run before blaming the model.

    toolkit run --nodes 2 --gpus-per-node 8 allreduce --min-bandwidth 100

Times all-reduce, all-gather and broadcast by message size: among the ranks of each node, between
the nodes (one rank of each), and over all ranks. What each rank receives is checked first. Sizes
and bandwidths are those of NVIDIA's nccl-tests (its ``doc/PERFORMANCE.md``): the algorithm
bandwidth is the message's size by the time; the bus bandwidth is what the slowest link had to
carry, so that it can be held against the hardware's figure, whatever the number of ranks. Other
than theirs, the time of a call is the slowest rank's, not the mean over the ranks.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from workloads.common.errors import WorkloadError
from workloads.common.metrics import Metrics
from workloads.common.options import Parser, positive_float, process_options
from workloads.common.ranks import Ranks, process_group, run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from toolkit.entrypoint import World

COLLECTIVES = ("all_reduce", "all_gather", "broadcast")
ROUNDS = 5  # the median of so many counts
WARMUP = 2
SECONDS = 0.5  # that a measurement should take
# In a round, back to back: the root of a broadcast is ahead of its receivers, so that one call
# alone takes longer than one of several.
LEAST_CALLS, MOST_CALLS = 4, 1000
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
PATTERN = 61  # prime, so that a block that lands in the wrong place shows
TOO_SLOW = 1  # exit code
# Its name from torch 2.13 on, where the older one warns at every call.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Scope:
    """Who exchanges data with whom.

    Attributes:
        name: ``node`` (ranks of each node, all nodes at once), ``nodes`` (the first rank of each)
            or ``all``.
        groups: Ranks that talk to each other; a rank is in one group or in none.
    """

    name: str
    groups: tuple[tuple[int, ...], ...]

    def group_of(self, rank: int) -> tuple[int, ...] | None:
        return next((group for group in self.groups if rank in group), None)


@dataclass(frozen=True)
class Row:
    """One measurement; of several groups the slowest counts.

    Attributes:
        collective: One of ``COLLECTIVES``.
        scope: A scope's name.
        ranks: Ranks in the group.
        bytes: The message: what every rank holds in the end.
        latency_us: Microseconds a call, of the slowest rank.
        algorithm_gb_s: Algorithm bandwidth, 10**9 bytes a second.
        bus_gb_s: Bus bandwidth, likewise.
        slowest: First rank of the group that was slowest.
    """

    collective: str
    scope: str
    ranks: int
    bytes: int
    latency_us: float
    algorithm_gb_s: float
    bus_gb_s: float
    slowest: int


def scopes(node_of: Sequence[int]) -> list[Scope]:
    """Decide who is to be measured, from each rank's node; the widest scope comes last."""
    nodes: dict[int, list[int]] = {}
    for rank, node in enumerate(node_of):
        nodes.setdefault(node, []).append(rank)
    within = tuple(tuple(ranks) for ranks in nodes.values() if len(ranks) > 1)
    found = [Scope("node", within)] if within else []
    if len(nodes) > 1:
        found.append(Scope("nodes", (tuple(ranks[0] for ranks in nodes.values()),)))
    if within and len(nodes) > 1:
        found.append(Scope("all", (tuple(range(len(node_of))),)))
    return found


def bus_factor(collective: str, ranks: int) -> float:
    """Bus bandwidth by algorithm bandwidth, as nccl-tests defines it."""
    return {
        "all_reduce": 2 * (ranks - 1) / ranks,
        "all_gather": (ranks - 1) / ranks,
        "broadcast": 1.0,
    }[collective]


def make_row(collective: str, scope: Scope, size: int, seconds: Sequence[float]) -> Row:
    """Sum up a measurement.

    Args:
        collective: One of ``COLLECTIVES``.
        scope: Who took part.
        size: Bytes of the message, as asked for.
        seconds: Of a call, by rank; a call of a group lasts until its last rank is done.
    """
    last = [max(seconds[rank] for rank in group) for group in scope.groups]
    taken = max(last)
    group = scope.groups[last.index(taken)]
    parts = len(group) if collective == "all_gather" else 1
    message = 4 * part_count(collective, size, len(group)) * parts
    bandwidth = message / taken / 1e9
    return Row(
        collective,
        scope.name,
        len(group),
        message,
        round(taken * 1e6, 2),
        bandwidth,
        bandwidth * bus_factor(collective, len(group)),
        group[0],
    )


class Exchange:
    """One collective with messages of one size, in one group."""

    def __init__(
        self,
        collective: str,
        size: int,
        group: tuple[int, ...],
        process_group: ProcessGroup,
        ranks: Ranks,
    ) -> None:
        self.collective, self.group, self.process_group = collective, group, process_group
        self.place = group.index(ranks.world.rank)
        # An all-gather's message is what comes together: each rank gives its part.
        self.count = part_count(collective, size, len(group))
        self.mine = torch.zeros(self.count, device=ranks.device)
        parts = len(group) if collective == "all_gather" else 0
        self.every = torch.empty(parts * self.count, device=ranks.device)

    def call(self) -> None:
        """Start it; on a GPU it is done when the device is."""
        if self.collective == "all_reduce":
            dist.all_reduce(self.mine, group=self.process_group)
        elif self.collective == "all_gather":
            # Not all_gather: with NCCL that copies what has come once more, into its list.
            ALL_GATHER(self.every, self.mine, group=self.process_group)
        else:
            dist.broadcast(self.mine, src=self.group[0], group=self.process_group)

    def wrong_values(self) -> int:
        """Do it once with values that tell who sent them; return how many arrived wrong."""
        sender = [place % PATTERN for place in range(len(self.group))]
        values = self._values()
        self.mine.copy_(values + sender[self.place])
        self.call()
        if self.collective == "all_reduce":
            wrong = self.mine != values * len(sender) + sum(sender)
        elif self.collective == "all_gather":
            parts = self.every.view(len(sender), self.count)
            wrong = parts != values + torch.tensor(sender, device=values.device)[:, None]
        else:
            wrong = self.mine != values
        found = int(wrong.sum())
        self.mine.zero_()  # sums of zeros stay zero, however often they are taken
        return found

    def _values(self) -> Tensor:
        # Small whole numbers: float32 holds their sums exactly up to 2**24, so of 100,000 ranks.
        return torch.arange(self.count, device=self.mine.device).remainder_(PATTERN).float()


def part_count(collective: str, size: int, ranks: int) -> int:
    """How many float32 numbers a rank gives; at least one."""
    return max(1, size // 4 // (ranks if collective == "all_gather" else 1))


def measure(
    ranks: Ranks, collective: str, scope: Scope, size: int, groups: dict[str, ProcessGroup]
) -> Row:
    """Check and time one collective, on all ranks at once.

    Raises:
        WorkloadError: A rank received wrong values.
    """
    group = scope.group_of(ranks.world.rank)
    exchange = Exchange(collective, size, group, groups[scope.name], ranks) if group else None

    wrong = ranks.gather(exchange.wrong_values() if exchange else 0)
    if any(wrong):
        first = next(rank for rank, count in enumerate(wrong) if count)
        msg = (
            f"rank {first} received {wrong[first]} wrong values in {collective} of "
            f"{show_bytes(size)} (scope {scope.name}); a network or a GPU that changes data "
            f"spoils every training run"
        )
        raise WorkloadError(msg, 1)

    def timed(calls: int) -> list[float]:
        return [ns / 1e9 for ns in ranks.gather(_nanoseconds(exchange, calls, ranks.device))]

    # All ranks see all times, so all decide on the same number of calls.
    one = max(timed(WARMUP))
    calls = min(MOST_CALLS, max(LEAST_CALLS, round(SECONDS / ROUNDS / one)))
    rounds = sorted((timed(calls) for _ in range(ROUNDS)), key=max)
    return make_row(collective, scope, size, rounds[ROUNDS // 2])


def _nanoseconds(exchange: Exchange | None, calls: int, device: torch.device) -> int:
    """How long a call took here; 0 on a rank that takes no part."""
    if exchange is None:
        return 0
    _finish(device)
    begun = time.perf_counter_ns()
    for _ in range(calls):
        exchange.call()
    _finish(device)
    return (time.perf_counter_ns() - begun) // calls


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def joined(rank: int, found: Sequence[Scope], world_size: int) -> dict[str, tuple[int, ...] | None]:
    """Decide which process group a rank makes for each scope: its members, or None for all ranks.

    Every rank makes one for the same scopes, alone where it takes no part: NCCL splits the
    communicator of all ranks, which waits for each of them (ncclCommSplit), and torch names a group
    by its members and by how many its ranks have. A group that nothing needs is not made: with a
    second one alive, gloo's broadcast of 64 MB takes 6 to 10 % longer.
    """
    return {
        scope.name: None if len(scope.groups[0]) == world_size else scope.group_of(rank) or (rank,)
        for scope in found
    }


def make_groups(rank: int, found: Sequence[Scope], world_size: int) -> dict[str, ProcessGroup]:
    """Make this rank's process groups, by scope."""
    assert dist.group.WORLD
    # Only its members meet: with many nodes, all of them at every group takes long.
    return {
        name: dist.new_group(list(members), use_local_synchronization=True)
        if members
        else dist.group.WORLD
        for name, members in joined(rank, found, world_size).items()
    }


def fastest_links(root: Path = Path("/sys/class")) -> tuple[list[str], float] | None:
    """This node's fastest network devices and their rates' sum in GB/s, as the kernel tells.

    Several equal ones carry a ring each between GPUs, so it is their sum that can be reached. An
    adapter with an Ethernet and an RDMA device counts once. None where no device has a rate.

    Sources: Documentation/ABI of sysfs-class-infiniband (``100 Gb/sec (4X EDR)``, ``4: ACTIVE``)
    and sysfs-class-net (``speed``, Mbit/s; a virtual device has -1 or none).
    """
    found: dict[Path, tuple[float, str]] = {}  # by adapter
    for file in sorted(root.glob("infiniband/*/ports/*/rate")):
        match = re.match(r"([\d.]+) Gb/sec", _text(file))
        if match and "ACTIVE" in _text(file.with_name("state")):
            device = file.parents[2]
            found[(device / "device").resolve()] = float(match.group(1)) / 8, device.name
    for file in sorted(root.glob("net/*/speed")):
        adapter, speed = file.parent / "device", _text(file)
        # A device without hardware behind it (veth, bridge) names a rate that means nothing.
        if speed.isdecimal() and adapter.exists():
            found.setdefault(adapter.resolve(), (int(speed) / 8e3, file.parent.name))
    if not found:
        return None
    fastest = max(rate for rate, _ in found.values())
    names = [name for rate, name in found.values() if rate == fastest]
    return names, fastest * len(names)


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # a link that is down cannot be read
        return ""


NETWORK = {
    "nccl": "NCCL_DEBUG=INFO names it, and NCCL_IB_HCA or NCCL_SOCKET_IFNAME chooses it",
    "gloo": "GLOO_SOCKET_IFNAME chooses it",
}


def verdict(rows: Sequence[Row], least: float | None, backend: str) -> tuple[Row, str | None]:
    """The best all-reduce over the widest scope, and what to say where it is too slow."""
    widest = rows[-1].scope
    reduces = [row for row in rows if row.collective == "all_reduce"]
    best = max((row for row in reduces if row.scope == widest), key=lambda row: row.bus_gb_s)
    if least is None or best.bus_gb_s >= least:
        return best, None
    parts = [
        f"{row.scope} {row.bus_gb_s:.3g}"
        for row in reduces
        if row.bytes == best.bytes and row.scope != widest
    ]
    beside = f" (the same within a smaller scope: {', '.join(parts)})" if parts else ""
    return best, (
        f"too slow: all_reduce reaches {best.bus_gb_s:.3g} GB/s of bus bandwidth over "
        f"{best.ranks} ranks at {show_bytes(best.bytes)}, and --min-bandwidth expects "
        f"{least:g}{beside}. Look at which network the ranks take: {NETWORK[backend]}"
    )


def bench(ranks: Ranks, options: argparse.Namespace, metrics: Metrics) -> None:
    """Measure everything and judge."""
    world, device = ranks.world, ranks.device
    ranks.store.set(f"host/{world.rank}", platform.node())
    node_of = ranks.gather(world.node_rank)
    found = scopes(node_of)
    groups = make_groups(world.rank, found, world.world_size)
    backend = dist.get_backend()
    metrics.say(
        f"world size {world.world_size} on {world.num_nodes} node(s), {device.type}, {backend}; "
        f"bandwidths in GB/s (10^9 bytes a second)"
    )
    metrics.say(
        f"{'collective':11} {'scope':>5} {'ranks':>6} {'size':>9} {'time us':>12} "
        f"{'algorithm':>10} {'bus':>8}  slowest group"
    )
    rows: list[Row] = []
    for scope in found:
        for collective in COLLECTIVES:
            for size in options.sizes:
                row = measure(ranks, collective, scope, size, groups)
                rows.append(row)
                host = ranks.store.get(f"host/{row.slowest}").decode()
                where = f"{host}, rank {row.slowest}" if len(scope.groups) > 1 else ""
                metrics.say(
                    f"{collective:11} {scope.name:>5} {row.ranks:6} {show_bytes(row.bytes):>9} "
                    f"{row.latency_us:12.1f} {row.algorithm_gb_s:10.3f} {row.bus_gb_s:8.3f}"
                    f"  {where}".rstrip()
                )
            # What was measured stays where the rest does not end.
            metrics.write(measurements=[asdict(row) for row in rows])

    best, complaint = verdict(rows, options.min_bandwidth, backend)
    smallest = min((r for r in rows if r.scope == best.scope), key=lambda row: row.bytes)
    # The "nodes" of one's own machine share its memory, not a link.
    shares_memory = world.num_nodes == 1 or os.environ.get("TOOLKIT_TARGET") == "local"
    links = None if shares_memory else fastest_links()
    metrics.write(
        bus_gb_s=best.bus_gb_s,
        latency_us=smallest.latency_us,
        min_bandwidth_gb_s=options.min_bandwidth,
        links_gb_s=links[1] if links else None,
        world_size=world.world_size,
        device=device.type,
        backend=backend,
    )
    metrics.say(
        f"found: all_reduce over {best.ranks} ranks reaches {best.bus_gb_s:.3g} GB/s of bus "
        f"bandwidth at {show_bytes(best.bytes)}; every value received was right"
    )
    metrics.say(f"expected: {expectation(best.bus_gb_s, links, options.min_bandwidth)}")
    if complaint:
        raise WorkloadError(complaint, TOO_SLOW)


def expectation(found: float, links: tuple[list[str], float] | None, least: float | None) -> str:
    """What the bandwidth found is to be held against, in words.

    Args:
        found: The best all-reduce's bus bandwidth, GB/s.
        links: Names and summed rate of rank 0's fastest links; None where unknown or unused.
        least: ``--min-bandwidth``.
    """
    parts = []
    if least is not None:
        parts.append(f"{least:g} or more (--min-bandwidth): {'ok' if found >= least else 'FAILED'}")
    if links:
        names, rate = links
        parts.append(
            f"up to {rate:g}, the rate of {platform.node()}'s fastest link"
            f"{'s' if len(names) > 1 else ''} ({', '.join(names)}): {found / rate:.0%} of it"
        )
    return "; ".join(parts) or "nothing is known of the links; --min-bandwidth gives a verdict"


def show_bytes(size: int) -> str:
    """``65536`` is ``64K``; what is no multiple of a unit stays in bytes."""
    unit = next(u for u in ("G", "M", "K", "") if size % UNITS[u] == 0)
    return f"{size // UNITS[unit]}{unit}"


def byte_counts(text: str) -> tuple[int, ...]:
    """Read sizes such as ``4K,16M,1G`` (powers of 1024), each of 4 bytes or more."""
    sizes = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,12})([KMG]?)", part.strip().upper())
        size = int(match.group(1)) * UNITS[match.group(2)] if match else 0
        if size < 4 or size > 64 * UNITS["G"]:
            raise argparse.ArgumentTypeError(f"{part!r} is not a size from 4 to 64G, such as 16M")
        sizes.append(size)
    return tuple(sizes)


def main(world: World) -> None:
    """Read the options, meet, measure."""
    options = parse()
    if world.world_size < 2:
        msg = "one rank has nobody to exchange data with: start 2 or more (--ntasks-per-node 2)"
        raise WorkloadError(msg)
    with process_group(world, options.device, timedelta(seconds=options.timeout)) as ranks:
        metrics = Metrics(os.environ, world.rank)
        bench(ranks, options, metrics)
        metrics.close()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the options, from the command line unless they are given.

    Raises:
        WorkloadError: One of them is wrong.
    """
    parser = Parser("allreduce", "Time collectives between the ranks, and check what they bring.")
    add: Callable[..., object] = parser.add_argument
    add(
        "--sizes",
        type=byte_counts,
        default=byte_counts("1K,16K,256K,4M,64M"),
        metavar="SIZE,SIZE",
        help="bytes of the messages (1K,16K,256K,4M,64M)",
    )
    add(
        "--min-bandwidth",
        type=positive_float,
        metavar="GB/s",
        help="end with 1 where the best all-reduce over all ranks has less bus bandwidth",
    )
    process_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(run("allreduce", main))
