"""Slurm's host lists and tasks-per-node lists, read without scontrol."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.entrypoint import EntrypointError
from toolkit.entrypoint.hostlist import LIMIT, expand, tasks_per_node


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        pytest.param(
            "nodeA,nodeB[001,003],nodeC",
            ["nodeA", "nodeB001", "nodeB003", "nodeC"],
            id="case_2_1-mixed",
        ),
        pytest.param("linux[1,2]", ["linux1", "linux2"], id="case_2_1-list"),
        pytest.param("alpha,beta,gamma", ["alpha", "beta", "gamma"], id="case_2_1-plain"),
        pytest.param("ia-zone-ia810", ["ia-zone-ia810"], id="case_2_1-dashes"),
        pytest.param("cpn-m11-[15-16]", ["cpn-m11-15", "cpn-m11-16"], id="case_2_1-dash-range"),
        pytest.param("n[1-2] n3", ["n1", "n2", "n3"], id="case_2_1-space"),
        pytest.param(
            "rack[0-1]_blade[0-1]",
            ["rack0_blade0", "rack0_blade1", "rack1_blade0", "rack1_blade1"],
            id="case_2_2-two-brackets",
        ),
        pytest.param(
            "foo-[10-11]-[01-02]",
            ["foo-10-01", "foo-10-02", "foo-11-01", "foo-11-02"],
            id="case_2_2-padded",
        ),
        pytest.param("n[08-10]", ["n08", "n09", "n10"], id="case_2_3-padding"),
        pytest.param("n[9-11]", ["n9", "n10", "n11"], id="case_2_3-no-padding"),
        pytest.param("n[099-101]", ["n099", "n100", "n101"], id="case_2_3-three-digits"),
        pytest.param("n[09-10,011]", ["n09", "n10", "n011"], id="case_2_3-own-width"),
        pytest.param("n[1,03-04]", ["n1", "n03", "n04"], id="case_2_3-mixed-width"),
        pytest.param("nodes[006,011]", ["nodes006", "nodes011"], id="case_2_3-list"),
        pytest.param("n[1-2]-ib0.hpc", ["n1-ib0.hpc", "n2-ib0.hpc"], id="suffix"),
        pytest.param("[1-2]", ["1", "2"], id="no-prefix"),
        pytest.param("b,a,b", ["b", "a", "b"], id="order-and-duplicates-kept"),
        pytest.param("a,,b,", ["a", "b"], id="empty-items-dropped-as-slurm-does"),
        pytest.param("a, b\tc\n", ["a", "b", "c"], id="any-white-space"),
        pytest.param("a[1][2][3-4]", ["a123", "a124"], id="adjacent-brackets"),
        pytest.param(
            "a[1-2]b[3-4]c[5-6]",  # as scontrol of Slurm 22.05 and 24.11 prints it
            ["a1b3c5", "a1b3c6", "a2b3c5", "a2b3c6", "a1b4c5", "a1b4c6", "a2b4c5", "a2b4c6"],
            id="three-brackets",
        ),
        pytest.param(
            "a[1-2][3,5][7][8-9]z",
            ["a1378z", "a1379z", "a2378z", "a2379z", "a1578z", "a1579z", "a2578z", "a2579z"],
            id="four-brackets",
        ),
        pytest.param("a[1-2][3-4][9]", ["a139", "a239", "a149", "a249"], id="last-of-one-value"),
        pytest.param("n[9-011]", ["n9", "n10", "n11"], id="width-of-the-lower-bound"),
    ],
)
def test_expand(expression: str, names: list[str]) -> None:
    assert expand(expression) == names


MALFORMED = [
    "",
    " ",
    ",",
    "n[",
    "n]",
    "n[1",
    "n1]",
    "n[]",
    "n[1,]",
    "n[,1]",
    "n[1-]",
    "n[-1]",
    "n[1--2]",
    "n[1-2-3]",
    "n[3-1]",
    "n[a-b]",
    "n[1,a]",
    "n[[1]]",
    "n[1[2]]",
    "n[1]]",
    "n[ 1]",
    "n[1 2]",
    "n[+1]",
    "n[1_0]",
    "n[\u0661-\u0662]",
    "n[²]",
    "(null)",
    "n1;reboot",
    "n$(id)",
    "nöde",
    "n\x00",
    "n[0-99999999999]",
    "n[0-999999999999999999999999999999]",
    "n[" + "9" * 5000 + "]",
    "n[0-999][0-999][0-999]",
    "n[1-1000000],m",
    "[" * 100_000,
    "n[1]" * 100_000 + "[",
]


@pytest.mark.parametrize("expression", MALFORMED, ids=lambda text: ascii(text)[:40])
def test_malformed_text_is_an_error_that_quotes_it(expression: str) -> None:
    with pytest.raises(EntrypointError) as caught:
        expand(expression)
    assert ascii(expression)[1:20].rstrip("'") in str(caught.value)
    assert len(str(caught.value)) < 400
    assert caught.value.exit_code == 71


def test_a_large_cluster_is_read_whole() -> None:
    names = expand("r[1-100]n[001-100]")
    assert len(names) == 10_000
    assert (names[0], names[-1]) == ("r1n001", "r100n100")
    assert len(expand(f"n[1-{LIMIT}]")) == LIMIT


NAME = st.text("abcxyz-_.", min_size=1, max_size=5)
NUMBER = st.integers(0, 3000)


@settings(deadline=None)
@given(st.lists(st.tuples(NAME, NUMBER, st.integers(0, 20), st.integers(1, 6)), min_size=1))
def test_a_written_range_reads_back(parts: list[tuple[str, int, int, int]]) -> None:
    expression = ",".join(f"{p}[{low:0{w}}-{low + n:0{w}}]" for p, low, n, w in parts)
    expected = [f"{p}{i:0{w}}" for p, low, n, w in parts for i in range(low, low + n + 1)]
    assert expand(expression) == expected


BRACKET = st.lists(st.tuples(NUMBER, st.integers(0, 4), st.integers(1, 4)), min_size=1, max_size=3)
ITEM = st.tuples(st.sampled_from(["n", "node-", "a_b", "x12y"]), st.lists(BRACKET, max_size=3))


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="Slurm's scontrol is not installed")
@settings(max_examples=40, deadline=None)
@given(st.lists(ITEM, min_size=1, max_size=3), st.sampled_from([",", " "]))
def test_scontrol_agrees(
    items: list[tuple[str, list[list[tuple[int, int, int]]]]], separator: str
) -> None:
    def bracket(ranges: list[tuple[int, int, int]]) -> str:
        return "[" + ",".join(f"{low:0{w}}-{low + n:0{w}}" for low, n, w in ranges) + "]"

    # No suffix after the last bracket: 22.05 does not take it, 24.11 does.
    expression = separator.join(name + "z".join(map(bracket, rest)) for name, rest in items)
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as conf:
        conf.write("ClusterName=test\nSlurmctldHost=localhost\nNodeName=n1\n")
        conf.write("PartitionName=p Nodes=n1\n")
        conf.flush()
        done = subprocess.run(
            ["scontrol", "show", "hostnames", expression],
            env={**os.environ, "SLURM_CONF": conf.name},
            capture_output=True,
            check=True,
            timeout=30,
        )
    assert expand(expression) == done.stdout.decode().split()


@settings(deadline=None)
@given(st.text("n01-9[],() x\t", max_size=40) | st.text(max_size=40))
def test_any_text_is_a_list_of_clean_names_or_a_clean_error(expression: str) -> None:
    try:
        names = expand(expression)
    except EntrypointError:
        return
    assert names
    assert all(name and name.isascii() and not set(name) & set("[], ()\t") for name in names)


@pytest.mark.parametrize(
    ("expression", "tasks"),
    [
        pytest.param("7,1", [7, 1], id="case_4_2-uneven"),
        pytest.param("4(x2)", [4, 4], id="case_4_2-repeated"),
        pytest.param("1(x2)", [1, 1], id="case_4_2-ones"),
        pytest.param("2(x3),1", [2, 2, 2, 1], id="case_4_2-mixed"),
        pytest.param("16", [16], id="one-node"),
    ],
)
def test_tasks_per_node(expression: str, tasks: list[int]) -> None:
    assert tasks_per_node(expression) == tasks


@pytest.mark.parametrize(
    "expression",
    [
        "",
        ",",
        "4,",
        "x2",
        "4(x",
        "4(x2",
        "4(2)",
        "4(x)",
        "4(x2)3",
        "4((x2))",
        "-4",
        "4 (x2)",
        "0",
        "4(x0)",
        "\u0664",
        "4(x999999999)",
        "4(x999999999999999999999999)",
        "1(x600000),1(x600000)",
        "9" * 5000,
    ],
    ids=lambda text: ascii(text)[:40],
)
def test_malformed_tasks_are_an_error_that_quotes_them(expression: str) -> None:
    with pytest.raises(EntrypointError) as caught:
        tasks_per_node(expression)
    assert ascii(expression)[1:20].rstrip("'") in str(caught.value)
