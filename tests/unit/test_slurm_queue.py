"""Reading what squeue, scontrol and sacct print. The texts are those of 22.05.8 and 24.11.5."""

from __future__ import annotations

import pytest

from toolkit.slurm import queue

SCONTROL = (
    "JobId={0} JobName=x y UserId=tester(1001) GroupId=tester(1001) MCS_label=N/A Priority=1"
    " JobState={1} Reason={2} Dependency=(null) Requeue=1 ExitCode={3} RunTime=00:00:04"
    " StartTime=2026-11-30T22:09:00 NodeList={4} Comment=a=b\n"
)


def test_a_pending_job_has_a_reason_and_an_estimate() -> None:
    found = queue.parse_squeue("8", "PENDING|Resources|2026-12-01T08:00:00|\n")
    assert found is not None
    assert found.pending
    assert str(found) == "job 8 is pending (Resources), expected to start 2026-12-01T08:00:00"
    unknown = queue.parse_squeue("8", "PENDING|PartitionConfig|N/A|\n")
    assert unknown is not None
    assert unknown.start is None
    assert unknown.reason in queue.HOPELESS


def test_a_running_element_speaks_for_its_array() -> None:
    text = "PENDING|Resources|N/A|\nRUNNING|None|2026-12-01T08:00:00|node[01-02]\n"
    found = queue.parse_squeue("8", text)
    assert found is not None
    assert (found.state, found.nodes) == ("RUNNING", "node[01-02]")


@pytest.mark.parametrize("text", ["", "COMPLETED|None|2026-12-01T08:00:00|node01\n", "garbage"])
def test_squeue_leaves_finished_jobs_to_the_others(text: str) -> None:
    assert queue.parse_squeue("8", text) is None


@pytest.mark.parametrize(
    ("state", "exit_code", "code"),
    [
        ("FAILED", "3:0", 3),
        ("FAILED", "0:9", 137),
        ("TIMEOUT", "0:0", 124),
        ("COMPLETED", "0:0", 0),
        ("CANCELLED", "0:15", 130),
        ("OUT_OF_MEMORY", "0:125", 137),
        ("NODE_FAIL", "0:0", 75),
        ("PREEMPTED", "0:15", 75),
        ("FAILED", "0:0", 1),
    ],
)
def test_final_states_have_exit_codes(state: str, exit_code: str, code: int) -> None:
    text = SCONTROL.format("5", state, "None", exit_code, "node01")
    by_scontrol = queue.parse_scontrol("5", text)
    by_sacct = queue.parse_sacct("5", f"{state}|{exit_code}|None|2026-12-01T08:00:00|node01\n")
    for found in (by_scontrol, by_sacct):
        assert found is not None
        assert not found.active
        assert found.final_code == code


def test_sacct_says_who_cancelled() -> None:
    found = queue.parse_sacct("5", "CANCELLED by 1001|0:0|None|Unknown|None assigned\n")
    assert found is not None
    assert (found.state, found.start, found.nodes) == ("CANCELLED", None, None)


def test_commands_that_are_missing_know_nothing() -> None:
    assert queue.status("1", {"PATH": "/nonexistent"}) is None
