"""Whatever the variables are, the answer is a consistent World or a clean error."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.unit.test_entrypoint_launchers import BATCH, TORCHRUN, env, ompi, step
from toolkit.entrypoint import EntrypointError, World, resolve
from toolkit.entrypoint.launchers.slurm import block, cyclic

SMALL = st.integers(0, 9).map(str)
TEXTS = ["", " ", "-1", "+1", "1.5", "0x8", "007", "9999999999", "99999999999", "\udcff", "\u0665"]
NASTY = st.sampled_from(TEXTS) | st.text(st.characters(exclude_characters="\0"), max_size=8)
NUMBERS = [
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "NUM_NODES", "NNODES"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "PMIX_RANK"),
    *("MPI_LOCALRANKID", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_PROCID"),
    *("SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES"),
    *("SLURM_NTASKS", "SLURM_NNODES", "SLURM_NTASKS_PER_NODE", "SLURM_JOB_NUM_NODES"),
    "SLURM_JOB_ID",
]
LISTS = st.sampled_from(
    ["n1", "n[1-2]", "n[01-04]", "a,b,c", "n[", "n[2-1]", "(null)", "n[0-99999999999]", "n[1-2]]"]
)
TASKS = st.sampled_from(["1", "2", "4(x2)", "1(x2)", "7,1", "2(x3),1", "4(x999999999)", "4(x", "0"])
HOSTS = st.sampled_from(["n1", "localhost", "127.0.0.1", "::1", "10.0.0.1", "a b", "(null)"])
VALUES: dict[str, st.SearchStrategy[str]] = {
    **dict.fromkeys(NUMBERS, SMALL | NASTY),
    "SLURM_STEP_ID": SMALL | st.sampled_from(["4294967290", "4294967293"]) | NASTY,
    "SLURM_STEP_NODELIST": LISTS | NASTY,
    "SLURM_JOB_NODELIST": LISTS | NASTY,
    "SLURM_STEP_TASKS_PER_NODE": TASKS | NASTY,
    "SLURM_TASKS_PER_NODE": TASKS | NASTY,
    "SLURM_DISTRIBUTION": st.sampled_from(["block", "cyclic", "plane=2"]),
    "SLURMD_NODENAME": st.sampled_from(["n1", "n2", "a"]),
    "SLURM_NODE_ALIASES": st.sampled_from(["(null)", "n1:10.0.0.9:h", "n1:[::2", ":::"]),
    "MASTER_ADDR": HOSTS | NASTY,
    "MASTER_PORT": st.sampled_from(["29500", "0", "65536", "1"]) | NASTY,
    "TORCHELASTIC_RUN_ID": st.just("none"),
    "PYTORCH_VERSION": st.just("2.13.0"),
    "PMIX_NAMESPACE": NASTY,
    "NCCL_SOCKET_IFNAME": st.sampled_from(["lo", "eth0"]),
    "TOOLKIT_RANKS_FROM": st.sampled_from(
        ["torchrun", "mpi", "slurm", "pmi", "env", "none", "other"]
    ),
    "TOOLKIT_STRICT": st.sampled_from(["0", "1", "x"]),
    "TOOLKIT_TARGET": st.sampled_from(["local", "slurm"]),
}
# A launch that is whole, then some variables changed, added or taken away (None).
WHOLE = st.sampled_from(
    [
        {},
        BATCH,
        step(),
        step(SLURM_LOCALID=None, SLURM_NODEID=None),
        TORCHRUN,
        {**step(), **TORCHRUN},
        ompi(8, 5, 1, 4),
        {**BATCH, **ompi(4, 2, 2, 4)},
        {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
        env(5, 8, 1),
        env(1, 2, 1),
    ]
)
CHANGES = st.lists(st.sampled_from(sorted(VALUES)), max_size=6, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: st.none() | VALUES[name] for name in names})
)
ENVIRONS = st.builds(
    lambda whole, changes: {k: v for k, v in {**whole, **changes}.items() if v is not None},
    WHOLE,
    CHANGES,
) | st.fixed_dictionaries({}, optional=VALUES)


def assert_consistent(world: World) -> None:
    assert 0 <= world.rank < world.world_size
    assert 0 <= world.local_rank < world.local_world_size <= world.world_size
    assert 0 <= world.node_rank < world.num_nodes <= world.world_size
    assert world.world_size - world.local_world_size >= world.num_nodes - 1
    assert (world.num_nodes == 1) <= (world.local_world_size == world.world_size)
    assert 1 <= world.master_port <= 65535
    assert world.master_addr
    assert set(world.sources) == set(World.fields) - {"launcher"}
    assert all(world.sources.values())


def resolved(environ: dict[str, str]) -> World | EntrypointError:
    try:
        return resolve(environ)
    except EntrypointError as error:
        return error


@settings(max_examples=1000, deadline=None)
@given(ENVIRONS)
@example({**step(), "TORCHELASTIC_RUN_ID": "1", "GROUP_RANK": "7"})
@example({**BATCH, "PYTORCH_VERSION": "2", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "8"})
def test_any_environment_is_a_world_or_a_clean_error(environ: dict[str, str]) -> None:
    world = resolved(environ)
    if isinstance(world, EntrypointError):
        assert world.exit_code == 71
        assert 20 < len(str(world)) < 1000
        assert str(world).isprintable()
        return
    assert_consistent(world)
    exported = dict(environ)
    world.export(exported)
    again = resolve(exported)
    for name in World.fields:
        if name != "launcher":  # one process by no launcher has a complete set from now on
            assert getattr(again, name) == getattr(world, name)


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=5),
    st.sampled_from([block, cyclic]),
    st.sets(st.sampled_from(["SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_ID"])),
)
def test_the_ranks_of_a_step_agree_and_each_has_its_own_place(
    layout: list[int],
    distribution: object,
    lacking: set[str],
) -> None:
    assert distribution in (block, cyclic)
    place = block if distribution is block else cyclic
    worlds = []
    for rank in range(sum(layout)):
        node, local = place(rank, layout)
        environ = step(
            SLURM_STEP_NUM_TASKS=str(sum(layout)),
            SLURM_STEP_NUM_NODES=str(len(layout)),
            SLURM_STEP_TASKS_PER_NODE=",".join(map(str, layout)),
            SLURM_STEP_NODELIST=f"n[1-{len(layout)}]",
            SLURM_PROCID=str(rank),
            SLURM_LOCALID=str(local),
            SLURM_NODEID=str(node),
            SLURM_DISTRIBUTION=place.__name__,
        )
        world = resolve({name: environ[name] for name in environ if name not in lacking})
        assert (world.node_rank, world.local_rank) == (node, local)
        assert world.local_world_size == layout[node]
        worlds.append(world)
    for name in ("world_size", "num_nodes", "master_addr", "warnings"):
        assert len({getattr(world, name) for world in worlds}) == 1
    assert len({world.master_port for world in worlds}) == 1


@settings(deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_every_distribution_fills_every_place_once(layout: list[int]) -> None:
    places = {(node, local) for node, tasks in enumerate(layout) for local in range(tasks)}
    for distribution in (block, cyclic):
        assert {distribution(rank, layout) for rank in range(sum(layout))} == places
