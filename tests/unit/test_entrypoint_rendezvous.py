"""MASTER_ADDR and MASTER_PORT, decided from variables."""

from __future__ import annotations

import itertools
import os

import pytest

from tests.unit.test_entrypoint_launchers import check, env, ompi, refused, step
from toolkit.entrypoint import resolve
from toolkit.entrypoint.rendezvous import alias, derive_port, is_loopback

EC2 = {
    "SLURM_STEP_NODELIST": "ec[0-1]",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_PROCID": "1",
    "SLURM_NODE_ALIASES": "ec0:192.0.2.10:ip-a,ec1:192.0.2.11:ip-b",
    "SLURM_LAUNCH_NODE_IPADDR": "198.51.100.7",
}


def test_case_2_8_a_made_up_name_is_translated() -> None:
    world = resolve(EC2)
    check(world, master_addr="192.0.2.10", rank=1, node_rank=1, local_rank=0, world_size=2)
    assert world.sources["master_addr"] == "SLURM_NODE_ALIASES"


def test_case_2_8_no_aliases_leave_the_name() -> None:
    check(resolve({**EC2, "SLURM_NODE_ALIASES": "(null)"}), master_addr="ec0")


@pytest.mark.parametrize(
    ("aliases", "address"),
    [
        ("ec0:[2001:db8::1]:ip-a,ec1:192.0.2.11:ip-b", "2001:db8::1"),
        ("ec1:192.0.2.11:ip-b,ec0:192.0.2.10:ip-a", "192.0.2.10"),
        ("ec00:192.0.2.11:x", ""),
        ("ec0", ""),
        ("ec0:", ""),
        ("ec0:[", ""),
        ("", ""),
    ],
)
def test_case_2_8_aliases(aliases: str, address: str) -> None:
    assert alias(aliases, "ec0") == address


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "::1", "ip6-localhost", "127.1"])
def test_loopback_between_nodes_is_replaced(name: str) -> None:
    world = resolve(step(MASTER_ADDR=name))
    check(world, master_addr="node01")
    assert name in world.warnings[0]
    # Right on one node, and where all nodes are this machine.
    one = step(
        SLURM_STEP_NUM_TASKS="8",
        SLURM_STEP_NUM_NODES="1",
        SLURM_STEP_TASKS_PER_NODE="8",
        SLURM_STEP_NODELIST="node01",
        SLURM_LOCALID="5",
        SLURM_NODEID="0",
        MASTER_ADDR=name,
    )
    check(resolve(one), master_addr=name, warnings=())
    check(resolve(step(MASTER_ADDR=name, TOOLKIT_TARGET="local")), master_addr=name, warnings=())


def test_a_users_address_is_kept() -> None:
    check(resolve(step(MASTER_ADDR="ib0.node02")), master_addr="ib0.node02", warnings=())


def test_nodes_that_are_all_this_machine() -> None:
    check(resolve(step(TOOLKIT_TARGET="local")), master_addr="127.0.0.1", num_nodes=2)
    environ = env(5, 8, 1, LOCAL_WORLD_SIZE=4, TOOLKIT_TARGET="local")
    check(resolve(environ), master_addr="127.0.0.1", num_nodes=2)


def test_a_step_on_part_of_its_job_cannot_borrow_the_jobs_first_node() -> None:
    environ = step(SLURM_STEP_NODELIST=None, SLURM_JOB_NODELIST="node[01-04]")
    refused(environ, "MASTER_ADDR")
    check(resolve({**environ, "SLURM_JOB_NODELIST": "node[03-04]"}), master_addr="node03")


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("LOCALHOST", True),
        ("localhost.localdomain", True),
        ("localhost.", True),
        ("[::1]", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", True),
        ("127.0.0.53", True),
        ("127.example.org", False),
        ("1270.0.0.1", False),
        ("localhost.example.org", False),
        ("::10", False),
        ("node01", False),
    ],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) == expected


def port(job: int, number: int = 0, **more: str) -> int:
    return resolve(step(SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(number), **more)).master_port


@pytest.mark.parametrize("job", [7, 42, 999, 1038, 483140, 99999999, 9, 100089, 100008])
def test_case_3_1_and_3_5_a_valid_port_that_all_ranks_share(job: int) -> None:
    assert 1024 <= port(job) < 32768
    others = [
        port(job, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank % 4), SLURM_NODEID=str(rank // 4))
        for rank in range(8)
    ]
    assert set(others) == {port(job)}
    assert len({port(job + near) for near in range(-7, 8)}) == 15


@pytest.mark.parametrize("given", ["61007", "63324", "49159", "1", "65535"])
def test_case_3_1_a_users_or_hooks_port_is_kept(given: str) -> None:
    world = resolve(step(MASTER_PORT=given))
    assert world.master_port == int(given)
    assert world.sources["master_port"] == "MASTER_PORT"


@pytest.mark.parametrize("given", ["0", "65536", "99999999", "-1", "0x50", "29500 ", "http"])
def test_case_3_1_what_is_no_port_is_an_error(given: str) -> None:
    refused(step(MASTER_PORT=given), "MASTER_PORT", repr(given))


def test_case_3_2_array_elements_on_one_node() -> None:
    ports = {
        port(job, SLURM_ARRAY_JOB_ID="12", SLURM_ARRAY_TASK_ID=str(task))
        for task, job in ((1, 13), (2, 14), (3, 12))
    }
    assert len(ports) == 3


def test_case_3_6_jobs_that_collide_in_enroots_hook() -> None:
    for modulus in (4536, 16384):
        for times in range(1, 6):
            assert port(1038) != port(1038 + times * modulus)


def test_steps_of_neighbouring_jobs_at_once() -> None:
    jobs_and_steps = list(itertools.product(range(483140, 483240), range(100)))
    assert len({derive_port(*pair) for pair in jobs_and_steps}) == len(jobs_and_steps)


def test_ports_outside_slurm() -> None:
    check(resolve(env(1, 2, 1)), master_port=29500)
    check(resolve({}), master_port=derive_port(os.getpid()))
    one = resolve({**ompi(4, 2, 2, 4), "PMIX_NAMESPACE": "prterun-a-31@1"}).master_port
    two = resolve({**ompi(4, 2, 2, 4), "PMIX_NAMESPACE": "prterun-a-32@1"}).master_port
    assert one != two
    assert 1024 <= one < 32768


@pytest.mark.parametrize("name", ["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"])
def test_case_10_6_loopback_interfaces(name: str) -> None:
    assert f"{name}='lo'" in resolve(step(**{name: "lo"})).warnings[0]
    refused(step(**{name: "=lo", "TOOLKIT_STRICT": "1"}), name)
    for harmless in ("eno1,eth0", "^lo", "^lo,docker0", "", "lo0", "lo,eth0"):
        assert resolve(step(**{name: harmless})).warnings == ()
    assert resolve(step(**{name: "lo", "TOOLKIT_TARGET": "local"})).warnings == ()
    assert resolve({name: "lo"}).warnings == ()
    # Nothing is set or copied from rank 0: every node has its own names.
    assert name not in resolve(step(**{name: "eno1"})).environ()
