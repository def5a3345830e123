"""A task of a Slurm step, whose marks are SLURM_STEP_*.

A batch script and a shell of salloc have SLURM_PROCID and the job's SLURM_NTASKS, but are no step.
The job's values are stale in a smaller step (JOB_NODELIST, JOB_NUM_NODES and NTASKS_PER_NODE stay
as they were), so they count only where the step has none of its own. SLURM_JOB_NAME says nothing:
``interactive`` is only salloc's default. A step is completed from its layout, and checked until
everything adds up.
"""

from __future__ import annotations

from toolkit.entrypoint.hostlist import LIMIT, expand, tasks_per_node
from toolkit.entrypoint.world import EntrypointError, Ranks, quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from toolkit.entrypoint.world import Number, Variables

# Steps that are no tasks of srun (batch, extern, interactive, pending) have ids above this one.
# Source: SLURM_MAX_NORMAL_STEP_ID in slurm.h.
MAX_NORMAL_STEP_ID = 0xFFFFFFF0


def read(variables: Variables, forced: bool) -> Ranks | None:  # noqa: FBT001  as every launcher
    """The task's ranks, None in a batch, extern or interactive step.

    Raises:
        EntrypointError: what the step says is missing, ambiguous or does not add up, or RANK and
            the like contradict it.
    """
    step_id, step_name = variables.number("SLURM_STEP_ID", "SLURM_STEPID")
    marks = ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST")
    if forced and step_id is None and not any(variables.get(mark) for mark in marks):
        raise EntrypointError(
            "TOOLKIT_RANKS_FROM=slurm, but SLURM_STEP_ID is not set: this process is no task of a "
            "Slurm step; start it with srun."
        )
    if step_id is not None and step_id > MAX_NORMAL_STEP_ID:
        if not forced:
            return None
        raise EntrypointError(
            f"TOOLKIT_RANKS_FROM=slurm, but {step_name}={step_id} is a batch or interactive step, "
            "not one of tasks: start the command with srun."
        )
    ranks = read_step(variables)
    if not forced:
        agree_with_step(variables, ranks)
    job, name = variables.number("SLURM_JOB_ID", "SLURM_JOBID")
    if job is not None:
        # Never SLURM_ARRAY_JOB_ID, which all elements of an array share.
        ranks.port_key = (job, step_id or 0)
        ranks.port_key_source = name
    return ranks


def read_step(variables: Variables) -> Ranks:
    """The ranks of this task of a Slurm step.

    Raises:
        EntrypointError: what the step says is missing, ambiguous or does not add up.
    """
    step = Step(variables)
    rank = variables.require("SLURM_PROCID", "slurm"), "SLURM_PROCID"
    if rank[0] >= step.num_tasks[0]:
        raise step.contradiction(rank, step.num_tasks, "a rank is below the number of tasks")
    node, local = step.place(rank[0])
    ranks = Ranks(
        "slurm",
        world_size=step.num_tasks,
        rank=rank,
        local_rank=local,
        local_world_size=(step.layout[node[0]], step.layout_source),
        node_rank=node,
        num_nodes=step.num_nodes,
    )
    ranks.node_names = step.names
    ranks.node_names_source = step.names_source
    ranks.warnings += step.warnings
    return ranks


def agree_with_step(variables: Variables, ranks: Ranks) -> None:
    """RANK and the like may stand beside a step (pyxis and enroot's hook set them) if they agree.

    Raises:
        EntrypointError: one of them says something else.
    """
    for field in ("rank", "world_size", "local_rank", "local_world_size"):
        ours = getattr(ranks, field)
        theirs, name = variables.number(field.upper())
        if theirs is not None and theirs != ours:
            raise EntrypointError(
                f"{name}={theirs}, but the Slurm step says {ours} (from {ranks.sources[field]}): "
                f"unset {name} if it is stale, set TOOLKIT_RANKS_FROM=env if it is right, or "
                "TOOLKIT_RANKS_FROM=slurm to go by the step.",
                rank=ranks.rank,
            )
    node_rank, name = variables.number("NODE_RANK")
    if node_rank not in (None, ranks.node_rank):
        # Common and harmless: exported in the batch script from its own SLURM_NODEID.
        text = f"NODE_RANK={node_rank} is replaced by the Slurm step's {ranks.node_rank}"
        ranks.warnings.append(text)
        ranks.node_warnings.append(text)
    size, name = variables.number("PMI_SIZE")
    if size is not None and size > ranks.world_size:
        raise EntrypointError(
            f"{name}={size}, but the Slurm step has {ranks.world_size} tasks (from "
            f"{ranks.sources['world_size']}), as when mpiexec started this rank from a step of "
            "its own: set TOOLKIT_RANKS_FROM=pmi if it did, else TOOLKIT_RANKS_FROM=slurm.",
            rank=ranks.rank,
        )


class Step:
    """How many tasks a step has, on which nodes.

    Attributes:
        num_tasks, num_nodes: each with the variable it came from.
        names: the nodes' names in order, None where they are unknown.
        layout: the number of tasks on each node.
    """

    def __init__(self, variables: Variables):
        self.variables = variables
        self.warnings: list[str] = []
        nodelist, self.names_source = variables.first("SLURM_STEP_NODELIST")
        self.names = expand(nodelist, self.names_source) if nodelist else None
        tasks, self.layout_source = variables.first("SLURM_STEP_TASKS_PER_NODE")
        layout = tasks_per_node(tasks, self.layout_source) if tasks else None
        self.num_tasks = self._count_tasks(layout)
        self.num_nodes = self._count_nodes(layout)
        if self.num_nodes[0] > self.num_tasks[0]:
            raise self.contradiction(
                self.num_nodes, self.num_tasks, "every node has at least one task"
            )
        self._find_names()
        self.layout = layout or self._infer_layout()

    def contradiction(self, one: Number, other: Number, rule: str) -> EntrypointError:
        """The error for two numbers that cannot both be true."""
        return EntrypointError(
            f"The Slurm step does not add up: {one[1]} says {one[0]} and {other[1]} says "
            f"{other[0]}, but {rule}. One of them is stale, perhaps from an outer job: start the "
            "command with srun from a shell without SLURM_* variables.",
        )

    def _agreed(self, counts: list[Number], what: str) -> Number | None:
        """The one count that all of the step's own variables give, None where it has none."""
        for count in counts[1:]:
            if count[0] != counts[0][0]:
                raise self.contradiction(counts[0], count, f"both count the step's {what}")
        return counts[0] if counts else None

    def _count_tasks(self, layout: list[int] | None) -> Number:
        counts: list[Number] = []
        number, name = self.variables.number("SLURM_STEP_NUM_TASKS")
        if number is not None:
            counts.append((number, name))
        if layout:
            counts.append((sum(layout), "SLURM_STEP_TASKS_PER_NODE"))
        agreed = self._agreed(counts, "tasks")
        if agreed:
            return agreed
        number, name = self.variables.number("SLURM_NTASKS", "SLURM_NPROCS")
        if number is not None:
            return number, name
        text, name = self.variables.first("SLURM_TASKS_PER_NODE")
        if text:
            return sum(tasks_per_node(text, name)), name
        each, each_name = self.variables.number("SLURM_NTASKS_PER_NODE")
        nodes, nodes_name = self.variables.number("SLURM_STEP_NUM_NODES", "SLURM_NNODES")
        if each is not None and nodes is not None:
            return each * nodes, f"{each_name} x {nodes_name}"
        raise EntrypointError(
            "The Slurm step does not say how many tasks it has: SLURM_STEP_NUM_TASKS is not set; "
            "start the command with srun, or set TOOLKIT_RANKS_FROM=none to run alone.",
        )

    def _count_nodes(self, layout: list[int] | None) -> Number:
        counts: list[Number] = []
        number, name = self.variables.number("SLURM_STEP_NUM_NODES")
        if number is not None:
            counts.append((number, name))
        if self.names:
            counts.append((len(self.names), "SLURM_STEP_NODELIST"))
        if layout:
            counts.append((len(layout), "SLURM_STEP_TASKS_PER_NODE"))
        agreed = self._agreed(counts, "nodes")
        if agreed:
            return agreed
        number, name = self.variables.number("SLURM_NNODES")
        if number is not None:
            return number, name
        if self.num_tasks[0] == 1:
            return 1, self.num_tasks[1]
        text, name = self.variables.first("SLURM_TASKS_PER_NODE")
        job_layout = tasks_per_node(text, name) if text else []
        if sum(job_layout) == self.num_tasks[0]:
            return len(job_layout), name
        text, name = self.variables.first("SLURM_JOB_NODELIST", "SLURM_NODELIST")
        if text:
            return len(expand(text, name)), name
        raise EntrypointError(
            "The Slurm step does not say how many nodes it has: SLURM_STEP_NUM_NODES and "
            "SLURM_STEP_NODELIST are not set; start the command with srun.",
        )

    def _find_names(self) -> None:
        """Take the job's nodes where the step names none and has as many; check the step's own."""
        text, name = self.variables.first("SLURM_JOB_NODELIST", "SLURM_NODELIST")
        job = expand(text, name) if text else None
        if job and not self.variables.get("SLURM_HET_SIZE"):  # there a step may span two jobs
            if self.num_nodes[0] > len(job):
                raise self.contradiction(
                    self.num_nodes, (len(job), name), "a step has no more nodes than its job"
                )
            self._check_node((self.names or job)[0], self.names_source, job, name)
        if self.names is None and job and len(job) == self.num_nodes[0]:
            self.names, self.names_source = job, name
        here = self.variables.get("SLURMD_NODENAME")
        if self.names and here:
            self._check_node(here, "SLURMD_NODENAME", self.names, self.names_source)

    def _check_node(self, node: str, source: str, nodes: list[str], nodes_source: str) -> None:
        """Refuse a step that an outer job left behind, as when sbatch is typed inside srun."""
        if node not in nodes:
            raise EntrypointError(
                f"{source} says that this step has the node {quote(node)}, which is not in "
                f"{nodes_source}={quote(self.variables.get(nodes_source) or '')}: one of them is "
                "stale, perhaps from an outer job; start the command with srun from a shell "
                "without SLURM_* variables.",
            )

    def _infer_layout(self) -> list[int]:
        """The number of tasks on each node, where only one number is possible."""
        tasks, nodes = self.num_tasks[0], self.num_nodes[0]
        if nodes < 1 or tasks < 1:
            raise self.contradiction(self.num_nodes, self.num_tasks, "neither can be 0")
        if nodes > LIMIT:
            raise EntrypointError(
                f"{self.num_nodes[1]}={nodes} is more nodes than any cluster has."
            )
        if nodes in (1, tasks):
            self.layout_source = f"{self.num_tasks[1]} / {self.num_nodes[1]}"
            return [tasks // nodes] * nodes
        text, name = self.variables.first("SLURM_TASKS_PER_NODE")
        # The job's layout is the step's only where it comes to the same numbers.
        layout = tasks_per_node(text, name) if text else []
        if len(layout) == nodes and sum(layout) == tasks:
            self.layout_source = name
            return layout
        each, name = self.variables.number("SLURM_NTASKS_PER_NODE")
        if each is not None and each * nodes == tasks:
            self.layout_source = name
            return [each] * nodes
        raise EntrypointError(
            f"The Slurm step has {tasks} tasks (from {self.num_tasks[1]}) on {nodes} nodes (from "
            f"{self.num_nodes[1]}) and does not say how many on each: SLURM_STEP_TASKS_PER_NODE "
            "is not set; start the command with srun.",
        )

    def place(self, rank: int) -> tuple[Number, Number]:
        """The node and the local rank of ``rank``, completed where Slurm left one out."""
        node, node_source = self.variables.number("SLURM_NODEID")
        local, local_source = self.variables.number("SLURM_LOCALID")
        here = self.variables.get("SLURMD_NODENAME")
        if node is None and self.names and here:
            node, node_source = self.names.index(here), "SLURMD_NODENAME"
        if node is not None and node >= len(self.layout):
            raise self.contradiction(
                (node, node_source), self.num_nodes, "a node's id is below the number of nodes"
            )
        if node is None or local is None:
            derived = f"SLURM_PROCID, {self.layout_source}"
            found = self._distribute(rank, node, local)
            node_source = derived if node is None else node_source
            local_source = derived if local is None else local_source
            node, local = found
        if local >= self.layout[node]:
            raise self.contradiction(
                (local, local_source),
                (self.layout[node], self.layout_source),
                f"a local rank is below the number of tasks on its node (node {node})",
            )
        return (node, node_source), (local, local_source)

    def _distribute(self, rank: int, node: int | None, local: int | None) -> tuple[int, int]:
        """The place that Slurm's block or cyclic distribution gives and what is known allows.

        Where both do, SLURM_DISTRIBUTION decides, else block, Slurm's default, with a warning.
        """
        distribution = self.variables.get("SLURM_DISTRIBUTION") or ""
        places = [block(rank, self.layout), cyclic(rank, self.layout)]
        if distribution.startswith("cyclic"):
            places.reverse()
        fit = [p for p in places if node in (None, p[0]) and local in (None, p[1])]
        if fit:
            if fit[0] != fit[-1] and not distribution:
                unset = "SLURM_LOCALID" if local is None else "SLURM_NODEID"
                self.warnings.append(
                    f"{unset} is not set; Slurm's default, the block distribution of tasks, is "
                    "assumed"
                )
            return fit[0]
        known = ("SLURM_NODEID", node) if local is None else ("SLURM_LOCALID", local)
        missing = "SLURM_LOCALID" if local is None else "SLURM_NODEID"
        raise EntrypointError(
            f"{missing} is not set, and neither a block nor a cyclic distribution of tasks over "
            f"{self.layout_source} gives SLURM_PROCID={rank} the {known[0]} {known[1]}: start the "
            "command with srun.",
            rank=rank,
        )


def block(rank: int, layout: list[int]) -> tuple[int, int]:
    """The (node, local rank) of ``rank`` where nodes are filled one after the other."""
    for node, tasks in enumerate(layout):
        if rank < tasks:
            return node, rank
        rank -= tasks
    raise AssertionError("the caller checked that rank < sum(layout)")


def cyclic(rank: int, layout: list[int]) -> tuple[int, int]:
    """The (node, local rank) of ``rank`` where tasks are dealt to the nodes that have room."""
    depth = 0  # tasks dealt to every node that still has room
    order = sorted(layout)
    for at, tasks in enumerate(order):
        dealt = (tasks - depth) * (len(order) - at)
        if rank < dealt:
            break
        rank -= dealt
        depth = tasks
    local = depth + rank // (len(order) - at)
    roomy = [node for node, tasks in enumerate(layout) if tasks > depth]
    return roomy[rank % len(roomy)], local
