"""The World, and how variables are read on the way to it."""

from __future__ import annotations

import os

from toolkit.entrypoint import codes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    Number = tuple[int, str]  # a number, and the variable or rule that it came from

DIGITS = 10  # what any number may have


class EntrypointError(Exception):
    """Something that must stop this rank before its command starts.

    Attributes:
        exit_code: one of :mod:`toolkit.entrypoint.codes`.
        rank: the rank it is about, None where that could not be told.
    """

    def __init__(self, message: str, exit_code: int = codes.RANKS, rank: int | None = None):
        super().__init__(message)
        self.exit_code = exit_code
        self.rank = rank


def quote(value: str) -> str:
    """A variable's value as an error may show it: on one line, escaped, not too long."""
    return ascii(value if len(value) <= 120 else value[:100] + "...")


def is_number(value: str) -> bool:
    """Whether ``value`` is 1 to 10 ASCII digits: neither ``+1`` nor `` 1`` nor ``1_0``."""
    return 0 < len(value) <= DIGITS and value.isascii() and value.isdigit()


def parse_number(value: str, what: str) -> int:
    """A non-negative number of 1 to 10 ASCII digits.

    Raises:
        EntrypointError: ``value`` is anything else.
    """
    if is_number(value):
        return int(value)
    raise EntrypointError(
        f"{what}={quote(value)} is not a number of 1 to 10 digits: correct it or unset it."
    )


class Variables:
    """The environment as the rules read it: an empty variable is an unset one."""

    def __init__(self, environ: Mapping[str, str] | None = None):
        self._environ = os.environ if environ is None else environ

    def get(self, name: str) -> str | None:
        """The value of ``name``, None where it is unset or empty."""
        return self._environ.get(name) or None

    def first(self, *names: str) -> tuple[str | None, str]:
        """The first of ``names`` that has a value, and its name; ``(None, names[0])`` if none."""
        for name in names:
            value = self._environ.get(name)
            if value:
                return value, name
        return None, names[0]

    def number(self, *names: str) -> tuple[int | None, str]:
        """Like ``first``, as a number.

        Raises:
            EntrypointError: the value is no number.
        """
        value, name = self.first(*names)
        return (None if value is None else parse_number(value, name)), name

    def require(self, name: str, launcher: str) -> int:
        """The number in ``name``, which ``launcher`` cannot do without.

        Raises:
            EntrypointError: it is unset, or no number.
        """
        value = self.number(name)[0]
        if value is None:
            raise EntrypointError(
                f"{name} is not set, and without it the ranks of launcher {launcher!r} are "
                f"incomplete: set {name}, or choose another with TOOLKIT_RANKS_FROM."
            )
        return value

    def flag(self, name: str) -> bool:
        """Whether ``name`` is 1 (or true, yes, on).

        Raises:
            EntrypointError: it is something that is neither yes nor no.
        """
        value = (self.get(name) or "0").lower()
        if value in ("1", "true", "yes", "on"):
            return True
        if value in ("0", "false", "no", "off"):
            return False
        raise EntrypointError(f"{name}={quote(value)} is neither 1 nor 0.")


class Ranks:
    """What one launcher says; the World is this and an address and a port.

    Attributes:
        node_names: the names of the nodes in order, None where the launcher gives none.
        node_names_source: the variable they came from.
        port_key: what names this world and no other on the node, for the port: a job, by number
            or by name, and a step of it; None where nothing does.
        port_key_source: the variable that names the job.
        have_met: whether the launcher's own processes met at MASTER_ADDR and hold MASTER_PORT.
        warnings: what is doubtful but can be gone on with.
        node_warnings: those of ``warnings`` that can differ from node to node.
    """

    def __init__(
        self,
        launcher: str,
        *,
        world_size: Number,
        rank: Number,
        local_rank: Number,
        local_world_size: Number,
        node_rank: Number,
        num_nodes: Number,
    ):
        self.launcher = launcher
        self.world_size = world_size[0]
        self.rank = rank[0]
        self.local_rank = local_rank[0]
        self.local_world_size = local_world_size[0]
        self.node_rank = node_rank[0]
        self.num_nodes = num_nodes[0]
        self.sources = {
            "world_size": world_size[1],
            "rank": rank[1],
            "local_rank": local_rank[1],
            "local_world_size": local_world_size[1],
            "node_rank": node_rank[1],
            "num_nodes": num_nodes[1],
        }
        self.node_names: list[str] | None = None
        self.node_names_source = ""
        self.port_key: tuple[str | int, int] | None = None
        self.port_key_source = ""
        self.have_met = False
        self.warnings: list[str] = []
        self.node_warnings: list[str] = []
        self._check()

    def _check(self) -> None:
        """Refuse numbers that cannot all be true.

        Raises:
            EntrypointError: showing both values and where each came from.
        """
        if self.world_size >= 10**DIGITS:
            raise EntrypointError(
                f"world_size {self.world_size} (from {self.sources['world_size']}) is more than "
                "any cluster runs.",
                rank=self.rank,
            )
        for name, limit in (
            ("rank", "world_size"),
            ("local_rank", "local_world_size"),
            ("node_rank", "num_nodes"),
        ):
            if getattr(self, name) >= getattr(self, limit):
                raise self.contradiction(name, "is not below", limit)
        for name in ("local_world_size", "num_nodes"):
            if getattr(self, name) > self.world_size:
                raise self.contradiction(name, "is more than", "world_size")
        if self.num_nodes == 1 and self.local_world_size != self.world_size:
            raise self.contradiction("local_world_size", "on one node is not", "world_size")
        if self.num_nodes == 1 and self.local_rank != self.rank:
            raise self.contradiction("local_rank", "on one node is not", "rank")
        if self.world_size - self.local_world_size < self.num_nodes - 1:
            raise self.contradiction("local_world_size", "leaves too few of", "world_size")

    def contradiction(self, name: str, relation: str, other: str) -> EntrypointError:
        """The error for two fields that cannot both be true."""
        return EntrypointError(
            f"{name} {getattr(self, name)} (from {self.sources[name]}) {relation} {other} "
            f"{getattr(self, other)} (from {self.sources[other]}): the variables of launcher "
            f"{self.launcher!r} are not from one launch; unset the stale ones, or choose with "
            "TOOLKIT_RANKS_FROM.",
            rank=self.rank,
        )


class World:
    """Who this process is among the processes of the run.

    Attributes:
        world_size: number of processes.
        rank: 0 <= rank < world_size.
        local_rank: 0 <= local_rank < local_world_size.
        local_world_size: number of processes on this node.
        node_rank: 0 <= node_rank < num_nodes.
        num_nodes: number of nodes.
        master_addr: where rank 0 listens; the same text on every rank.
        master_port: 1 to 65535; the same on every rank.
        launcher: its name in the table of launchers.
        have_met: as the ranks have it.
        sources: for each of the first eight, the variable or rule that it came from.
        warnings: what is doubtful but was gone on with.
        node_warnings: those of ``warnings`` that can differ from node to node.
    """

    fields = (
        "world_size",
        "rank",
        "local_rank",
        "local_world_size",
        "node_rank",
        "num_nodes",
        "master_addr",
        "master_port",
        "launcher",
    )

    def __init__(
        self, ranks: Ranks, address: str, address_source: str, port: int, port_source: str
    ):
        self.world_size = ranks.world_size
        self.rank = ranks.rank
        self.local_rank = ranks.local_rank
        self.local_world_size = ranks.local_world_size
        self.node_rank = ranks.node_rank
        self.num_nodes = ranks.num_nodes
        self.master_addr = address
        self.master_port = port
        self.launcher = ranks.launcher
        self.have_met = ranks.have_met
        self.sources = dict(ranks.sources, master_addr=address_source, master_port=port_source)
        self.warnings = tuple(ranks.warnings)
        self.node_warnings = tuple(ranks.node_warnings)

    def __repr__(self) -> str:
        return f"World({', '.join(f'{name}={getattr(self, name)!r}' for name in self.fields)})"

    def as_dict(self) -> dict[str, object]:
        """The World as ``--show`` prints it."""
        shown: dict[str, object] = {name: getattr(self, name) for name in self.fields}
        shown["sources"] = dict(self.sources)
        shown["warnings"] = list(self.warnings)
        return shown

    def export(self, environ: dict[str, str]) -> None:
        """Put the World into ``environ``, where resolving again gives the same one."""
        environ.update(self.environ())
        if not self.have_met:
            # Leaked marks would make torch wait for an agent's store that is not there.
            environ.pop("TORCHELASTIC_RUN_ID", None)
            environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)

    def environ(self) -> dict[str, str]:
        """The variables that torch and the workloads read."""
        return {
            "WORLD_SIZE": str(self.world_size),
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "NODE_RANK": str(self.node_rank),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }
