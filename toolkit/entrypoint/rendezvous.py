"""Where the ranks meet: MASTER_ADDR and MASTER_PORT, decided from variables alone.

Every rank must come to the same answer without asking another, so only what all of them see
counts. Whether the answer can be used is :mod:`toolkit.entrypoint.checks`'s question.
"""

from __future__ import annotations

import os

from toolkit.entrypoint.world import EntrypointError, parse_number, quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from toolkit.entrypoint.world import Ranks, Variables

LOOPBACK = "127.0.0.1"  # needs no look-up, and means the same in every container
TORCH_PORT = 29500  # what torch's own launchers take

# Derived ports lie below 32768, where Linux starts giving out ports to clients, and are
#     LOWEST_PORT + (job * STRIDE + step) mod PRIME.
# Two (job, step) pairs share one only where dj * STRIDE + ds is a multiple of PRIME. STRIDE is
# about the root of PRIME, so none do among 140 consecutive jobs that each run up to 140 steps at
# once; and PRIME being a prime, jobs that differ by a round number, or by 4536 or 16384 (the moduli
# of enroot's PyTorch hooks), are hundreds of ports apart.
LOWEST_PORT = 10000
PRIME = 22751
STRIDE = 151

_LOOPBACK_NAMES = (
    "localhost",
    "localhost.localdomain",
    "localhost4",
    "localhost4.localdomain4",
    "localhost6",
    "localhost6.localdomain6",
    "ip6-localhost",
    "ip6-loopback",
    "0.0.0.0",  # noqa: S104  nothing is bound here: connecting to it reaches this machine
    "::",
    "::1",
    "0:0:0:0:0:0:0:1",
)


def is_loopback(host: str) -> bool:
    """Whether ``host`` can only mean the machine that asks."""
    name = host.strip("[]").rstrip(".").lower()
    if name in _LOOPBACK_NAMES or name.endswith(".localhost"):
        return True
    _, _, mapped = name.rpartition("::ffff:")
    return mapped.startswith("127.") and mapped.replace(".", "").isdigit()


def is_local_target(variables: Variables) -> bool:
    """Whether all "nodes" of this run are this machine, as in ``toolkit run --on local``."""
    return variables.get("TOOLKIT_TARGET") == "local"


def choose_address(variables: Variables, ranks: Ranks) -> tuple[str, str]:
    """MASTER_ADDR and the variable or rule that it came from.

    Raises:
        EntrypointError: several nodes, and nothing says where rank 0 is.
    """
    given = variables.get("MASTER_ADDR")
    local = ranks.num_nodes == 1 or is_local_target(variables)
    if given and (local or ranks.have_met or not is_loopback(given)):
        return given, "MASTER_ADDR"
    if local:
        return LOOPBACK, "one machine"
    if ranks.node_names:
        if given:
            ranks.warnings.append(
                f"MASTER_ADDR={quote(given)} is loopback in a step of {ranks.num_nodes} nodes; "
                f"the first node, {ranks.node_names[0]}, is used instead"
            )
        return first_node(variables, ranks)
    is_what = f"is {quote(given)}, which is loopback" if given else "is not set"
    raise EntrypointError(
        f"MASTER_ADDR {is_what}, but the world has {ranks.num_nodes} nodes (from "
        f"{ranks.sources['num_nodes']}) and launcher {ranks.launcher!r} does not say which of "
        "them is the first: set MASTER_ADDR to the host name of rank 0, on every rank.",
        rank=ranks.rank,
    )


def first_node(variables: Variables, ranks: Ranks) -> tuple[str, str]:
    """The first node's name, or its address where Slurm gives one for a name it made up."""
    assert ranks.node_names
    name = ranks.node_names[0]
    address = alias(variables.get("SLURM_NODE_ALIASES") or "", name)
    if address:
        return address, "SLURM_NODE_ALIASES"
    return name, ranks.node_names_source


def alias(aliases: str, name: str) -> str:
    """The address of ``name`` in SLURM_NODE_ALIASES, "" where it has none.

    The form is ``name:address:hostname,...``, an IPv6 address in brackets, or ``(null)``.
    Source: srun(1) of Slurm 22.05, OUTPUT ENVIRONMENT VARIABLES.
    """
    for entry in aliases.split(","):
        node, _, rest = entry.partition(":")
        if node == name:
            return rest[1:].partition("]")[0] if rest[:1] == "[" else rest.partition(":")[0]
    return ""


def choose_port(variables: Variables, ranks: Ranks) -> tuple[int, str]:
    """MASTER_PORT and the variable or rule that it came from.

    Raises:
        EntrypointError: MASTER_PORT is not a port.
    """
    given = variables.get("MASTER_PORT")
    if given:
        port = parse_number(given, "MASTER_PORT")
        if not 1 <= port <= 65535:
            raise EntrypointError(
                f"MASTER_PORT={quote(given)} is not a port: give 1 to 65535, or unset it to have "
                "one chosen.",
                rank=ranks.rank,
            )
        return port, "MASTER_PORT"
    if ranks.port_key:
        return derive_port(*ranks.port_key), ranks.port_key_source
    if ranks.world_size == 1:
        return derive_port(os.getpid()), "process id"
    return TORCH_PORT, "default"


def derive_port(job: str | int, step: int = 0) -> int:
    """A port of 10000 to 32750 for a job and step; a job named by text counts by its bytes."""
    if isinstance(job, str):
        number = 0
        for byte in os.fsencode(job):
            number = (number * 257 + byte) % PRIME
        job = number
    return LOWEST_PORT + (job * STRIDE + step) % PRIME


def loopback_interfaces(variables: Variables, ranks: Ranks) -> None:
    """Warn where NCCL or gloo is told to talk through loopback between nodes."""
    if ranks.num_nodes == 1 or is_local_target(variables):
        return
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = variables.get(name) or ""
        if all(interface.lstrip("=") == "lo" for interface in value.split(",")):
            ranks.warnings.append(
                f"{name}={quote(value)} is loopback in a world of {ranks.num_nodes} nodes, which "
                "cannot reach each other through it; unset it, or name the network's interface"
            )
