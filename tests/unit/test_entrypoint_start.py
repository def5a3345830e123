"""The entrypoint as a process: checks, exports, exec, signals, exit codes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.unit.test_entrypoint_launchers import BATCH, TORCHRUN, env, step
from toolkit.entrypoint import resolve
from toolkit.entrypoint.rendezvous import derive_port
from toolkit.entrypoint.start import count_threads
from toolkit.entrypoint.world import Variables
from toolkit.pyz import write_entrypoint

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATH = {"PATH": os.environ["PATH"]}


@pytest.fixture(scope="module")
def pyz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pyz") / "entrypoint.pyz"
    write_entrypoint(path)
    return path


def run(pyz: Path, *arguments: str, **environ: str | bytes) -> subprocess.CompletedProcess[bytes]:
    variables: dict[str, str | bytes] = {**PATH, **environ}
    return subprocess.run(
        [sys.executable, "-I", "-S", str(pyz), *arguments],
        env=variables,
        capture_output=True,
        check=False,
        timeout=60,
    )


@pytest.fixture
def taken() -> Iterator[int]:
    """A port below the ephemeral range that somebody listens on."""
    for port in range(20011, 20999):
        with socket.socket() as listener:
            try:
                listener.bind(("", port))
            except OSError:
                continue
            listener.listen()
            yield port
            return
    pytest.fail("no free port")


def test_show_is_the_json_of_the_design(pyz: Path) -> None:
    done = run(pyz, "--show", **step())
    shown = json.loads(done.stdout)
    assert list(shown) == [
        *("world_size", "rank", "local_rank", "local_world_size", "node_rank", "num_nodes"),
        *("master_addr", "master_port", "launcher", "sources", "warnings"),
    ]
    assert (shown["world_size"], shown["rank"], shown["master_addr"]) == (8, 5, "node01")
    assert shown == resolve(step()).as_dict()
    assert (done.returncode, done.stderr) == (0, b"")


def test_show_looks_nothing_up(pyz: Path) -> None:
    began = time.monotonic()
    done = run(pyz, "--show", **step(MASTER_ADDR="no-such-host.invalid"))
    assert json.loads(done.stdout)["master_addr"] == "no-such-host.invalid"
    assert time.monotonic() - began < 5


def test_hostlist(pyz: Path) -> None:
    assert run(pyz, "--hostlist", "n[08-10],x").stdout == b"n08\nn09\nn10\nx\n"
    done = run(pyz, "--hostlist", "n[1-")
    assert done.returncode == 71
    assert b"'n[1-'" in done.stderr


def test_a_reader_that_stops_early_is_no_error(pyz: Path) -> None:
    line = f"{sys.executable} -I -S {pyz} --hostlist 'n[1-200000]' | head -n 1"
    done = subprocess.run(["sh", "-c", line], capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"n1\n", b"")


@pytest.mark.parametrize(
    "arguments", [[], ["--"], ["--bad"], ["--hostlist"], ["--show", "x"], ["true"]]
)
def test_usage(pyz: Path, arguments: list[str]) -> None:
    done = run(pyz, *arguments)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"usage:")
    assert run(pyz, "--help").stdout.startswith(b"usage:")


def test_the_command_gets_the_world(pyz: Path) -> None:
    done = run(pyz, "--", "env", **step(TOOLKIT_TARGET="local", TORCHELASTIC_RUN_ID="leaked"))
    assert done.returncode == 0
    environ = dict(line.split("=", 1) for line in done.stdout.decode().splitlines())
    expected = {
        "WORLD_SIZE": "8",
        "RANK": "5",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "NODE_RANK": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(derive_port(501, 0)),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "SLURM_PROCID": "5",
    }
    assert {name: environ.get(name) for name in expected} == expected
    assert int(environ["OMP_NUM_THREADS"]) >= 1
    assert "TORCHELASTIC_RUN_ID" not in environ


def test_what_a_user_set_stays(pyz: Path) -> None:
    given = {"OMP_NUM_THREADS": "3", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "MASTER_PORT": "20001"}
    done = run(pyz, "--", "env", **step(TOOLKIT_TARGET="local", **given))
    for name, value in given.items():
        assert f"{name}={value}\n".encode() in done.stdout


def test_case_10_6_interfaces_pass_through(pyz: Path) -> None:
    command = ["--", "sh", "-c", "echo ${NCCL_SOCKET_IFNAME-unset}"]
    there = {**env(1, 2, 0), "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.2"}
    local = {**there, "TOOLKIT_TARGET": "local"}
    assert run(pyz, *command, **local, NCCL_SOCKET_IFNAME="eno1,eth0").stdout == b"eno1,eth0\n"
    assert run(pyz, *command, **local).stdout == b"unset\n"


def test_arguments_arrive_as_they_are(pyz: Path) -> None:
    arguments = ["a b", "", "--", ":", "'\"$HOME", "*", "x\ny"]
    done = run(pyz, "--", "printf", "%s\\0", *arguments)
    assert done.stdout.decode().split("\0")[:-1] == arguments


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ("0123456789abcdef", b""),
        ("fedcba9876543210", b"runs in build 'fedcba9876543210' of the image, not in '01234"),
        (None, b"may ignore --container-image"),
        ("", b"may ignore --container-image"),
    ],
)
def test_a_job_in_another_image_than_was_asked_for_does_not_start(
    pyz: Path, found: str | None, text: bytes
) -> None:
    says = {} if found is None else {"TOOLKIT_IMAGE_BUILD": found}
    ran = run(pyz, "--", "echo", "ran", TOOLKIT_EXPECTED_BUILD="0123456789abcdef", **says)
    assert (ran.returncode, ran.stdout) == ((78, b"") if text else (0, b"ran\n"))
    assert text in ran.stderr
    # Where nothing was asked for, any image will do.
    assert run(pyz, "--", "true", **says).returncode == 0


def test_exit_codes_are_the_commands_own(pyz: Path) -> None:
    assert run(pyz, "--", "sh", "-c", "exit 3").returncode == 3
    assert run(pyz, "--", "sh", "-c", "kill -9 $$").returncode == -9


@pytest.mark.parametrize("program", ["no-such-program", "/no/such/program", ""])
def test_a_missing_command(pyz: Path, program: str) -> None:
    done = run(pyz, "--", program)
    assert done.returncode == 127
    assert b"rank 0: the command " + repr(program).encode() in done.stderr


def test_a_command_that_cannot_be_executed(pyz: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("not a program")
    assert run(pyz, "--", str(plain)).returncode == 126
    assert b"Permission denied" in run(pyz, "--", str(tmp_path)).stderr
    plain.chmod(0o755)
    assert b"Exec format error" in run(pyz, "--", "plain", PATH=str(tmp_path)).stderr
    plain.write_text("#!/no/such/interpreter\n")
    done = run(pyz, "--", str(plain))
    assert done.returncode == 126
    assert b"interpreter" in done.stderr


def test_closed_and_full_outputs(pyz: Path) -> None:
    python = f"{sys.executable} -I -S {pyz}"
    done = subprocess.run(
        ["sh", "-c", f"{python} --show > /dev/full"], env=PATH, capture_output=True, check=False
    )
    assert done.returncode == 1
    assert b"cannot write the answer: No space left" in done.stderr
    # A warning that nobody can read does not stop the run.
    line = f"{python} -- echo started 2>&-"
    done = subprocess.run(
        ["sh", "-c", line], env={**PATH, **BATCH}, capture_output=True, check=True
    )
    assert done.stdout == b"started\n"


def test_the_process_becomes_the_command_and_gets_its_signals(pyz: Path) -> None:
    command = [sys.executable, "-I", "-S", str(pyz), "--", "sh", "-c", "echo $$; exec sleep 60"]
    with subprocess.Popen(command, env=PATH, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert int(process.stdout.readline()) == process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == -signal.SIGTERM


def test_no_signal_is_left_ignored(pyz: Path) -> None:
    # A Python that execs passes on that it ignores SIGPIPE, and `train | head` never ends.
    done = run(pyz, "--", "grep", "SigIgn", "/proc/self/status")
    ignored = int(done.stdout.split()[1], 16)
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        assert not ignored >> (number - 1) & 1


def test_an_address_that_does_not_resolve(pyz: Path) -> None:
    began = time.monotonic()
    variables = step(MASTER_ADDR="no-such-host.invalid", TOOLKIT_RENDEZVOUS_TIMEOUT="2")
    done = run(pyz, "--", "echo", "started", **variables)
    assert time.monotonic() - began < 10
    assert (done.returncode, done.stdout) == (76, b"")
    assert b"rank 5" in done.stderr
    assert b"'no-such-host.invalid'" in done.stderr
    assert b"MASTER_ADDR" in done.stderr


def test_case_2_8_a_node_name_that_only_slurm_knows(pyz: Path) -> None:
    variables = {
        "SLURM_STEP_NODELIST": "ec[0-1]",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_PROCID": "1",
        "SLURM_NODE_ALIASES": "(null)",
        "SLURM_LAUNCH_NODE_IPADDR": "198.51.100.7",
        "TOOLKIT_RENDEZVOUS_TIMEOUT": "2",
    }
    done = run(pyz, "--", "echo", "started", **variables)
    assert (done.returncode, done.stdout) == (76, b"")
    assert b"'ec0'" in done.stderr
    assert b"Set MASTER_ADDR" in done.stderr


# The one thing that cannot be had here for real is a name server that does not answer.
RESOLVER = """
import sys, time, _socket
from toolkit.entrypoint import __main__, checks
class Resolver:
    calls = 0
    def __getattr__(self, name):
        return getattr(_socket, name)
    def getaddrinfo(self, *arguments):
        self.calls += 1
        {behaviour}
checks._socket = Resolver()
__main__.main(["--", "echo", "started"])
"""


@pytest.mark.parametrize(
    ("behaviour", "code", "shown"),
    [
        ("time.sleep(60)", 76, b"within 1 s"),
        ("raise _socket.gaierror(_socket.EAI_AGAIN, 'try again')", 76, b"try again"),
        ("if self.calls < 3: raise _socket.gaierror(_socket.EAI_AGAIN, 'x')", 0, b""),
        ("raise _socket.gaierror(_socket.EAI_NONAME, 'unknown')", 76, b"unknown"),
    ],
    ids=["silent", "never-ready", "ready-at-last", "unknown"],
)
def test_a_resolver_has_a_limit(behaviour: str, code: int, shown: bytes) -> None:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", RESOLVER.format(behaviour=behaviour)],
        env={**PATH, **step(TOOLKIT_RENDEZVOUS_TIMEOUT="1")},
        capture_output=True,
        check=False,
        timeout=30,
    )
    assert time.monotonic() - began < 10
    assert done.returncode == code
    assert shown in done.stderr
    assert (done.stdout == b"started\n") == (code == 0)


def test_a_limit_that_is_no_number(pyz: Path) -> None:
    done = run(pyz, "--", "true", **step(TOOLKIT_RENDEZVOUS_TIMEOUT="soon"))
    assert done.returncode == 71
    assert b"TOOLKIT_RENDEZVOUS_TIMEOUT='soon'" in done.stderr


def test_case_3_6_a_port_in_use_fails_on_rank_0_at_once(pyz: Path, taken: int) -> None:
    variables = {**env(0, 2, 0), "MASTER_PORT": str(taken)}
    began = time.monotonic()
    done = run(pyz, "--", "echo", "started", **variables)
    assert time.monotonic() - began < 5
    assert (done.returncode, done.stdout) == (76, b"")
    assert f"rank 0: 127.0.0.1:{taken} is in use".encode() in done.stderr
    assert b"MASTER_PORT" in done.stderr


def test_case_3_6_only_rank_0_outside_torchrun_binds_the_port(pyz: Path, taken: int) -> None:
    port = {"MASTER_PORT": str(taken)}
    assert run(pyz, "--", "true", **env(1, 2, 1), **port).returncode == 0
    agent = {**TORCHRUN, **env(0, 2, 0), "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    assert run(pyz, "--", "true", **{**agent, **port, "MASTER_ADDR": "localhost"}).returncode == 0
    by_file = {**env(0, 2, 0), **port, "TOOLKIT_INIT_METHOD": "file:///tmp/x"}
    assert run(pyz, "--", "true", **by_file).returncode == 0


def test_case_3_6_a_process_alone_takes_the_next_port(
    pyz: Path, taken: int, tmp_path: Path
) -> None:
    alone = step(
        SLURM_STEP_NUM_TASKS="1",
        SLURM_STEP_NUM_NODES="1",
        SLURM_STEP_TASKS_PER_NODE="1",
        SLURM_STEP_NODELIST="node01",
        SLURM_PROCID="0",
        SLURM_LOCALID="0",
        SLURM_NODEID="0",
    )
    job = next(job for job in range(100_000) if derive_port(job, 0) == taken)
    command = ["--", "sh", "-c", "echo $MASTER_PORT"]
    done = run(
        pyz, *command, **{**alone, "SLURM_JOB_ID": str(job), "TOOLKIT_RUN_DIR": str(tmp_path)}
    )
    assert taken < int(done.stdout) < taken + 100
    record = json.loads((tmp_path / "ranks" / "0.json").read_text())
    assert record["master_port"] == int(done.stdout)
    # One that the user chose is not given up silently.
    done = run(pyz, *command, **{**alone, "MASTER_PORT": str(taken)})
    assert done.returncode == 76


def test_file_rendezvous_needs_no_address(pyz: Path) -> None:
    variables = step(MASTER_ADDR="no-such-host.invalid", TOOLKIT_INIT_METHOD="file:///tmp/x")
    assert run(pyz, "--", "true", **variables).returncode == 0


def test_warnings_come_from_one_rank_only(pyz: Path) -> None:
    assert (
        b"toolkit: rank 0: warning: the allocation asks for 8"
        in run(pyz, "--", "true", **BATCH).stderr
    )
    lo = {"MASTER_ADDR": "127.0.0.1", "TOOLKIT_INIT_METHOD": "file:///x"}
    assert run(pyz, "--", "true", **step(**lo)).stderr == b""
    first = step(SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0", **lo)
    assert b"rank 0: warning: MASTER_ADDR='127.0.0.1'" in run(pyz, "--", "true", **first).stderr


def test_wrong_ranks_stop_before_the_command(pyz: Path) -> None:
    done = run(pyz, "--", "echo", "started", **step(RANK="3"))
    assert (done.returncode, done.stdout) == (71, b"")
    assert done.stderr.startswith(b"toolkit: rank 5: RANK=3, but the Slurm step says 5")
    assert done.stderr.count(b"\n") == 1


def test_values_that_are_not_utf8(pyz: Path) -> None:
    assert run(pyz, "--", "sh", "-c", 'printf %s "$X"', X=b"\xff\xfe").stdout == b"\xff\xfe"
    for locale in ("C", "C.UTF-8", "POSIX"):
        done = run(pyz, "--", "true", RANK=b"\xff", LC_ALL=locale)
        assert done.returncode == 71
        assert b"Traceback" not in done.stderr
    done = run(pyz, "--", "true", **step(TOOLKIT_RENDEZVOUS_TIMEOUT="1"), MASTER_ADDR=b"\xff")
    assert done.returncode == 76
    assert b"Traceback" not in done.stderr
    assert json.loads(run(pyz, "--show", MASTER_ADDR=b"\xff").stdout)["rank"] == 0


def test_the_record_of_a_rank(pyz: Path, tmp_path: Path) -> None:
    variables = step(TOOLKIT_TARGET="local", TOOLKIT_RUN_DIR=str(tmp_path), MY_TOKEN="s3cret")
    done = run(pyz, "--", "sh", "-c", "echo $$", **variables)
    assert [path.name for path in tmp_path.rglob("*")] == ["ranks", "5.json"]
    text = (tmp_path / "ranks" / "5.json").read_text()
    record = json.loads(text)
    assert record["pid"] == int(done.stdout)
    assert record["host"] == socket.gethostname()
    assert abs(record["started"] - time.time()) < 60
    assert (record["rank"], record["world_size"], record["launcher"]) == (5, 8, "slurm")
    assert "s3cret" not in text


def test_a_record_quotes_what_json_needs_quoted(pyz: Path, tmp_path: Path) -> None:
    for address in ('a"b\\c', "\n\t", "ö", "\U0001f600", "\udcff"):
        run(
            pyz,
            "--",
            "true",
            **env(1, 2, 1),
            MASTER_ADDR=os.fsencode(address),
            TOOLKIT_INIT_METHOD="file:///x",
            TOOLKIT_RUN_DIR=str(tmp_path),
            LOCAL_WORLD_SIZE="2",
            LC_ALL="C.UTF-8",
        )
        record = json.loads((tmp_path / "ranks" / "1.json").read_text())
        assert record["master_addr"] == address


def test_a_record_that_cannot_be_written_is_a_warning(pyz: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    done = run(pyz, "--", "echo", "started", TOOLKIT_RUN_DIR=str(blocked))
    assert (done.returncode, done.stdout) == (0, b"started\n")
    assert b"rank 0: warning" in done.stderr
    assert b"TOOLKIT_RUN_DIR" in done.stderr


ONE_NODE = step(
    SLURM_STEP_NUM_NODES="1",
    SLURM_STEP_TASKS_PER_NODE="8",
    SLURM_STEP_NODELIST="node01",
    SLURM_LOCALID="5",
    SLURM_NODEID="0",
)


@pytest.mark.parametrize(
    ("environ", "allowed", "machine", "threads"),
    [
        pytest.param(ONE_NODE, 4, 64, 4, id="bound-to-its-own"),
        pytest.param(ONE_NODE, 64, 64, 8, id="not-bound"),
        pytest.param({**ONE_NODE, "SLURM_CPUS_PER_TASK": "3"}, 64, 64, 3, id="cpus-per-task"),
        pytest.param({**ONE_NODE, "SLURM_CPUS_PER_TASK": "99"}, 64, 64, 64, id="never-more"),
        pytest.param({**ONE_NODE, "SLURM_CPUS_ON_NODE": "16"}, 64, 64, 2, id="part-of-a-node"),
        pytest.param({**ONE_NODE, "SLURM_CPUS_ON_NODE": "16"}, 16, 64, 2, id="job-cpuset"),
        pytest.param({**ONE_NODE, "SLURM_CPUS_ON_NODE": "16"}, 2, 64, 2, id="bound-in-part"),
        pytest.param(ONE_NODE, 1, 1, 1, id="at-least-one"),
        pytest.param(ONE_NODE, 4, 4, 1, id="more-ranks-than-cpus"),
        pytest.param(env(1, 2, 1), 8, 64, 4, id="container-cpuset-shared-by-its-ranks"),
        pytest.param({}, 8, 64, 8, id="alone"),
        pytest.param({**step(), "TOOLKIT_TARGET": "local"}, 16, 64, 2, id="nodes-on-one-machine"),
    ],
)
def test_threads(environ: dict[str, str], allowed: int, machine: int, threads: int) -> None:
    assert count_threads(resolve(environ), Variables(environ), allowed, machine) == threads


def test_two_processes_that_are_alone_on_a_machine_do_not_collide(pyz: Path) -> None:
    command = ["--", "sh", "-c", "echo $MASTER_PORT"]
    assert run(pyz, *command).stdout != run(pyz, *command).stdout


def open_files(pyz: Path, limits: str, ranks: int) -> tuple[str, str]:
    """``ulimit -Sn`` of a rank's command, and what the entrypoint says, under these limits."""
    variables = {**env(0, ranks, 0), "TOOLKIT_INIT_METHOD": "file:///x", **PATH}
    start = f'{limits}; exec "$0" -I -S "$1" -- sh -c "ulimit -Sn"'
    ran = subprocess.run(
        ["sh", "-c", start, sys.executable, str(pyz)],
        env=variables,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return ran.stdout.strip(), ran.stderr


def test_rank_0_may_hold_a_connection_to_every_rank(pyz: Path) -> None:
    assert open_files(pyz, "ulimit -Sn 1024; ulimit -Hn 5000", 2000) == ("4512", "")
    assert open_files(pyz, "ulimit -Sn 1024; ulimit -Hn 5000", 8) == ("1024", "")
    # Never less than there was.
    assert open_files(pyz, "ulimit -Sn 4000; ulimit -Hn 5000", 1024) == ("4000", "")
    allowed, said = open_files(pyz, "ulimit -Sn 1024; ulimit -Hn 2000", 2000)
    assert allowed == "2000"
    assert "2000 files may be open" in said
    assert "each of 2000 ranks" in said
