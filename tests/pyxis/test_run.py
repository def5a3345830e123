"""``toolkit run`` and ``submit`` in containers, through pyxis and enroot on a real cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli import shared_folder, toolkit


@pytest.fixture
def shared() -> Iterator[Path]:
    with shared_folder() as folder:
        yield folder


def test_ranks_are_resolved_in_the_container_and_the_folder_is_the_workspace(
    shared: Path, container_image: Path
) -> None:
    (shared / "here").touch()
    show = (
        "import os; print(*(os.environ[k] for k in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR')),"
        " os.getcwd(), os.listdir('.'))"
    )
    words = ("run", "-N", "2", "--ntasks-per-node", "2", "--runs", str(shared.parent / "r"))
    ran = toolkit(shared, *words, "--image", container_image, "--", "python3", "-c", show)
    assert ran.returncode == 0, ran.stderr
    assert sorted(ran.stdout.splitlines()) == [
        f"[rank {rank}] {rank} 4 node01 /workspace ['here']" for rank in range(4)
    ]


def test_arguments_and_variables_arrive_byte_for_byte(shared: Path, container_image: Path) -> None:
    words = ["", "a b", "$HOME", "`x`", "it's", '"q"', "*", ":", "a\nb", "é"]
    show = "import os, sys; print(ascii((sys.argv[1:], os.environ['NOTE'])))"
    note = "it's $5; ok, =x"
    start = ("run", "--image", container_image, "--env", f"NOTE={note}", "--env", "PYTHONUTF8=1")
    ran = toolkit(shared, *start, "--", "python3", "-c", show, *words)
    assert ran.stdout == f"[rank 0] {(words, note)!a}\n", ran.stderr


def test_the_login_nodes_environment_stays_out(shared: Path, container_image: Path) -> None:
    show = 'echo "${PYTHONPATH-}${LD_LIBRARY_PATH-}${VIRTUAL_ENV-}${CONDA_PREFIX-}$KEPT"'
    login = dict.fromkeys(("PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX"), "/x")
    words = ("run", "--image", container_image, "--", "sh", "-c", show)
    ran = toolkit(shared, *words, **login, KEPT="kept")
    assert ran.returncode == 0, ran.stderr
    assert "[rank 0] kept" in ran.stdout.splitlines()


@pytest.mark.parametrize("how", ["run", "submit"])
def test_a_failing_rank_in_a_container(shared: Path, container_image: Path, how: str) -> None:
    fail = "[ $RANK = 1 ] && { echo why; exit 3; }; exec sleep 150"
    ran = toolkit(shared, how, "-N", "2", "--image", container_image, "--", "sh", "-c", fail)
    if how == "submit":
        assert ran.returncode == 0, ran.stderr
        ran = toolkit(shared, "logs", "-f")
    assert ran.returncode == 3, ran.stderr
    assert "rank 1 on node02" in ran.stderr
    assert "| why" in ran.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--image", "/nowhere/pyg.sqsh"), "/nowhere/pyg.sqsh"),
        (("--image", "IMAGE", "--container-workdir", "/nope"), "/nope"),
        (("--image", "IMAGE", "--mount", "/nowhere/data:/data"), "/nowhere/data"),
    ],
)
@pytest.mark.parametrize("how", ["run", "submit"])
def test_a_container_that_does_not_start_is_78_and_why(
    shared: Path, container_image: Path, how: str, options: tuple[str, ...], says: str
) -> None:
    given = [str(container_image) if word == "IMAGE" else word for word in options]
    ran = toolkit(shared, how, "-N", "2", *given, "--", "true")
    if how == "submit":
        assert ran.returncode == 0, ran.stderr
        ran = toolkit(shared, "logs", "-f")
    assert ran.returncode == 78, ran.stderr
    result = json.loads((shared / "runs/latest/result.json").read_text())
    assert result["failure"]["origin"] == "slurm"
    assert says in result["failure"]["reason"]


def test_the_root_is_read_only_unless_asked(shared: Path, container_image: Path) -> None:
    write = ("--", "sh", "-c", "touch /etc/x && echo written")
    ran = toolkit(shared, "run", "--image", container_image, *write)
    assert "written" not in ran.stdout
    ran = toolkit(shared, "run", "--image", container_image, "--container-writable", *write)
    assert "written" in ran.stdout, ran.stderr


def test_file_rendezvous_is_the_runs_own_mount(shared: Path, container_image: Path) -> None:
    show = ("--", "sh", "-c", "echo $TOOLKIT_INIT_METHOD")
    ran = toolkit(shared, "run", "--rendezvous", "file", "--image", container_image, *show)
    assert "file:///toolkit-run/rendezvous" in ran.stdout, ran.stderr
