"""The test bed itself: what the other tests of this tier take for granted."""

from __future__ import annotations

import json
import os
import pwd
import re
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.testbed import LIMIT, TESTBED, make_shared, run

USERS = ("root", "tester")


def up(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [TESTBED / "up", "slurm", *args],
        check=False,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env={**os.environ, **env},
    )


def accounted(job: str) -> list[str]:
    """State and exit code of a finished job from sacct, which is a moment behind the controller."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        row = run("sacct", "-X", "-n", "-P", "-j", job, "-o", "State,ExitCode,End").stdout.strip()
        if row and not row.endswith("Unknown"):
            return row.split("|")[:2]
        time.sleep(0.2)
    pytest.fail(f"sacct does not know job {job}")


@pytest.mark.parametrize("user", USERS)
def test_nodes_are_two_hosts(user: str) -> None:
    script = """
        touch "/dev/shm/$SLURMD_NODENAME"
        sleep 0.5
        python3 - <<'END'
import json, os, pathlib, socket
print(json.dumps({
    "host": socket.gethostname(),
    "address": socket.gethostbyname(socket.gethostname()),
    "peers": [socket.gethostbyname(name) for name in ("node01", "node02")],
    "shm": os.listdir("/dev/shm"),
    "hosts": pathlib.Path("/etc/hosts").read_text(),
    "pid1": pathlib.Path("/proc/1/cmdline").read_text().split("\\0"),
}))
END
        rm "/dev/shm/$SLURMD_NODENAME"
    """
    ran = run("srun", "-N2", "--ntasks-per-node=1", "bash", "-c", script, user=user)
    assert ran.returncode == 0, ran.stderr
    first, second = sorted(map(json.loads, ran.stdout.splitlines()), key=lambda node: node["host"])
    assert (first["host"], second["host"]) == ("node01", "node02")
    assert first["address"] != second["address"]
    assert first["peers"] == second["peers"] == [first["address"], second["address"]]
    assert not first["address"].startswith("127.")
    assert (first["shm"], second["shm"]) == (["node01"], ["node02"])
    login = Path("/etc/hosts").read_text()
    assert len({first["hosts"], second["hosts"], login}) == 3
    assert "node01" in first["pid1"]


def test_login_node_resolves_the_nodes() -> None:
    found = run("getent", "hosts", "node01", "node02")
    assert len(set(re.findall(r"^[\d.]+", found.stdout, re.MULTILINE))) == 2


def test_nodes_reach_each_other() -> None:
    script = """
import os, socket, time
if os.environ["SLURM_PROCID"] == "0":
    with socket.create_server(("", 29511)) as server:
        server.settimeout(20)
        print(server.accept()[0].recv(10).decode())
else:
    for _ in range(100):
        try:
            socket.create_connection(("node01", 29511), timeout=5).send(b"hello")
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
"""
    ran = run("srun", "-N2", "--ntasks-per-node=1", "python3", "-c", script)
    assert (ran.returncode, ran.stdout) == (0, "hello\n"), ran.stderr


def test_gpus_are_handed_out() -> None:
    script = 'echo "$SLURM_GPUS_ON_NODE $CUDA_VISIBLE_DEVICES"'
    ran = run("srun", "-N2", "--ntasks-per-node=1", "--gpus-per-node=2", "bash", "-c", script)
    assert ran.stdout.splitlines() == ["2 0,1", "2 0,1"], ran.stderr
    one_each = run("srun", "-N1", "-n2", "--gpus-per-task=1", "bash", "-c", script)
    assert sorted(line.split()[1] for line in one_each.stdout.splitlines()) == ["0", "1"]


@pytest.mark.parametrize("user", USERS)
def test_batch_job_is_accounted_for(user: str) -> None:
    script = "srun hostname; exit 3"
    submitted = run("sbatch", "--parsable", "--wait", "-N2", "--wrap", script, user=user)
    job = submitted.stdout.split()[0]
    assert submitted.returncode == 3, submitted.stderr
    output = Path(os.environ["TOOLKIT_TESTBED_SHARED"], f"slurm-{job}.out")
    assert sorted(output.read_text().split()) == ["node01", "node02"]
    assert output.owner() == user
    assert accounted(job) == ["FAILED", "3:0"]


def test_an_account_is_needed() -> None:
    refused = run("srun", "-A", "nobodys", "true")
    assert refused.returncode == 1
    assert "Invalid account" in refused.stderr
    assert run("srun", "-A", "testbed", "true", user="tester").returncode == 0


def test_exit_code_and_its_rank_are_told() -> None:
    script = "exit $((SLURM_PROCID * 3))"
    ran = run("srun", "-N2", "--ntasks-per-node=1", "bash", "-c", script)
    assert ran.returncode == 3
    assert "node02: task 1: Exited with exit code 3" in ran.stderr


def test_a_job_cannot_take_more_memory_than_it_asked_for() -> None:
    script = "import time; hoard = bytearray(10**9); time.sleep(30)"
    ran = run("srun", "-J", "hoard", "-N1", "--mem=100M", "python3", "-c", script)
    assert ran.returncode != 0
    if os.environ["TOOLKIT_TESTBED_MEMORY_LIMIT"] == "cgroup":
        assert "task 0: Out Of Memory" in ran.stderr
    else:
        assert "exceeded memory limit" in ran.stderr


def test_urgent_partition_preempts_and_the_job_runs_again() -> None:
    script = 'if [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; then sleep 300; fi'
    job = run("sbatch", "--parsable", "-N2", "--exclusive", "--wrap", script).stdout.strip()
    wait_for_state(job, "RUNNING")
    assert run("srun", "-p", "urgent", "-N2", "--exclusive", "true").returncode == 0
    wait_for_state(job, "COMPLETED")
    # 24.11 may requeue a second time what ends within a moment of its restart.
    assert re.search(r"Restarts=[12] ", run("scontrol", "show", "job", job).stdout)


def wait_for_state(job: str, state: str) -> None:
    end = time.monotonic() + LIMIT
    shown = ""
    while time.monotonic() < end:
        shown = run("scontrol", "show", "job", job).stdout
        if f"JobState={state} " in shown:
            return
        time.sleep(0.2)
    pytest.fail(f"job {job} did not become {state}:\n{shown}")


def test_second_up_changes_nothing() -> None:
    before = run("scontrol", "show", "config").stdout
    again = up()
    assert again.returncode == 0
    assert "is up already" in again.stderr
    boot = re.compile(r"^BOOT_TIME.*", re.MULTILINE)
    assert boot.findall(run("scontrol", "show", "config").stdout) == boot.findall(before)


def test_another_release_is_refused_while_one_is_up() -> None:
    other = {"22.05": "24.11"}.get(os.environ["TOOLKIT_TESTBED_RELEASE"], "22.05")
    refused = up("--release", other)
    assert refused.returncode == 1
    assert "ci/testbed/down slurm first" in refused.stderr
    assert run("sinfo").returncode == 0


def test_second_test_bed_is_refused(tmp_path: Path) -> None:
    refused = up(TOOLKIT_TESTBED_STATE=str(tmp_path / "other"))
    assert refused.returncode == 1
    assert "another test bed is up" in refused.stderr
    assert not (tmp_path / "other").exists()
    assert run("sinfo").returncode == 0


def test_env_file_is_all_that_a_shell_needs() -> None:
    script = f'. "{TESTBED}/env" && srun --version && sinfo --noheader'
    shell = subprocess.run(
        ["env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "bash", "-c", script],
        check=False,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert shell.returncode == 0, shell.stderr
    assert f" {os.environ['TOOLKIT_TESTBED_RELEASE']}." in shell.stdout.splitlines()[0]
    assert "node[01-02]" in shell.stdout


def test_status_tells_health() -> None:
    assert run(TESTBED / "status", "slurm").returncode == 0
    none = run(TESTBED / "status", "slurm", TOOLKIT_TESTBED_STATE="/nonexistent")
    assert none.returncode == 1


def test_down_leaves_nothing_and_a_failed_up_cleans_up(
    restartable: None,  # noqa: ARG001
) -> None:
    """Also that a first ``up`` after a failed one works: the cluster is back at the end."""
    release = os.environ["TOOLKIT_TESTBED_RELEASE"]
    submitted = run("sbatch", "-N2", "--wrap", "srun setsid sleep 1234.5")
    assert submitted.returncode == 0
    wait_for_state(submitted.stdout.split()[-1], "RUNNING")
    subprocess.run([TESTBED / "down", "slurm"], check=True)
    assert leftovers() == []
    failed = up("--release", release, TOOLKIT_PYXIS_SO="/etc/hostname")
    assert failed.returncode == 1
    assert "the cluster did not come up" in failed.stderr
    assert leftovers() == []
    assert up("--release", release).returncode == 0
    make_shared()
    assert run("srun", "-N2", "true").returncode == 0


@pytest.fixture
def restartable() -> None:
    """Only where nobody else relies on this cluster."""
    if os.environ.get("TOOLKIT_TESTBED_STARTED_BY") != str(os.getpid()):
        pytest.skip("the test bed was up before the tests: others may be using it")


def leftovers() -> list[str]:
    """Everything of a Slurm test bed that is on this machine."""
    state = os.environ.get("TOOLKIT_TESTBED_STATE", "/var/tmp/toolkit-testbed")
    found = [
        path
        for path in (state + "/slurm", "/run/toolkit-testbed-slurm", "/home/tester")
        if Path(path).exists()
    ]
    found += [name for _, name in socket.if_nameindex() if name.startswith("tbslurm")]
    found += [str(path) for path in Path("/sys/fs/cgroup").glob("*/toolkit-testbed-slurm")]
    found += [entry.pw_name for entry in pwd.getpwall() if entry.pw_name == "tester"]
    found += [line for line in Path("/etc/hosts").read_text().splitlines() if "node01" in line]
    found += [
        line
        for line in Path("/proc/mounts").read_text().splitlines()
        if re.search("toolkit-testbed[-/]slurm", line)
    ]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if re.search(r"slurmctld|slurmd|slurmstepd|mariadbd|munged|sleep 1234\.5", command):
            found.append(command)
    return found
