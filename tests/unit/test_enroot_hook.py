"""The files of ``enroot/``: the hook as enroot runs it, and installing them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.enroot import install
from toolkit.enroot.credentials import problems
from toolkit.enroot.site import find
from toolkit.entrypoint.hostlist import expand
from toolkit.entrypoint.rendezvous import derive_port
from toolkit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

HOOK = install.files() / "hooks.d" / "60-toolkit-ranks.sh"
STEP = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "3",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "node[01-02]",
    # The job's, which the step does not fill.
    "SLURM_NTASKS": "16",
    "SLURM_JOB_NODELIST": "node[00-03]",
}


def hook(folder: Path, environ: Mapping[str, str], image: str = "") -> dict[str, str]:
    """The container's environment after the hook, as the last line for each name decides."""
    file = folder / "environment"
    file.write_text(image)
    own = {"PATH": os.environ["PATH"], "ENROOT_ENVIRON": str(file)}
    ran = subprocess.run([HOOK], env={**own, **environ}, capture_output=True, text=True, check=True)
    assert ran.stdout + ran.stderr == ""
    lines = file.read_text().splitlines()
    names = [line.partition("=")[0] for line in lines]
    assert len(set(names)) == len(names), "a name stands twice"
    return dict(line.split("=", 1) for line in lines)


@pytest.mark.parametrize("image", ["A=b\n", "PYTORCH_VERSION=2.3\n"])
def test_every_image_gets_the_steps_own_variables(tmp_path: Path, image: str) -> None:
    set_ = hook(tmp_path, STEP, image)
    version = set_.pop("PYTORCH_VERSION")
    assert version == ("2.3" if "2.3" in image else "")  # pyxis then sets RANK and LOCAL_RANK
    set_.pop("A", None)
    assert set_ == {
        "WORLD_SIZE": "7",
        "LOCAL_WORLD_SIZE": "3",
        "NODE_RANK": "1",
        "MASTER_ADDR": "node01",
        "MASTER_PORT": str(derive_port(1234, 3)),
    }


def test_stale_values_of_image_job_and_other_hooks_are_replaced(tmp_path: Path) -> None:
    image = "WORLD_SIZE=16\nNODE_RANK=0\nMASTER_PORT=61234\n"  # as enroot's 50-slurm-pytorch does
    set_ = hook(tmp_path, {**STEP, "WORLD_SIZE": "99", "LOCAL_WORLD_SIZE": "8"}, image)
    assert (set_["WORLD_SIZE"], set_["LOCAL_WORLD_SIZE"], set_["NODE_RANK"]) == ("7", "3", "1")
    assert set_["MASTER_PORT"] == "61234"


@pytest.mark.parametrize(
    ("given", "nodes", "address"),
    [
        ("10.0.0.7", "node[01-02]", "10.0.0.7"),
        ("localhost", "node[01-02]", "node01"),
        ("127.0.1.1", "node[01-02]", "node01"),
        ("", "node[01-02]", "node01"),
        ("localhost", "node07", "localhost"),
        ("", "node07", "127.0.0.1"),
    ],
)
@pytest.mark.parametrize("where", ["image", "job"])
def test_an_address_is_kept_unless_it_is_loopback_between_nodes(
    tmp_path: Path, given: str, nodes: str, address: str, where: str
) -> None:
    step = dict(STEP, SLURM_STEP_NODELIST=nodes)
    if nodes == "node07":
        step |= {"SLURM_STEP_TASKS_PER_NODE": "7", "SLURM_NODEID": "0"}
    set_ = (
        hook(tmp_path, {**step, "MASTER_ADDR": given})
        if where == "job"
        else hook(tmp_path, step, f"MASTER_ADDR={given}\n")
    )
    assert set_["MASTER_ADDR"] == address


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_STEP_ID": "4294967291"},  # a batch script
        {"SLURM_STEP_ID": ""},
        {"SLURM_STEP_NUM_TASKS": "8"},
        {"SLURM_STEP_TASKS_PER_NODE": ""},
        {"SLURM_STEP_TASKS_PER_NODE": "4,x"},
        {"SLURM_NODEID": "2"},
        {"SLURM_NODEID": "$(touch x)"},
        {"SLURM_STEP_NODELIST": ""},
        {"SLURM_HET_SIZE": "2"},
        {"SLURM_JOB_ID": ""},
    ],
    ids=str,
)
def test_nothing_is_set_where_the_step_does_not_add_up(
    tmp_path: Path, change: dict[str, str]
) -> None:
    assert hook(tmp_path, {**STEP, **change}, "A=b\n") == {"A": "b"}


def test_outside_of_slurm_nothing_is_set(tmp_path: Path) -> None:
    assert hook(tmp_path, {}, "A=b\n") == {"A": "b"}


@given(
    prefix=st.from_regex(r"[a-z]{1,6}-?", fullmatch=True),
    numbers=st.lists(
        st.from_regex(r"[0-9]{2}(-[0-9]{2})?", fullmatch=True), min_size=1, max_size=3
    ),
    suffix=st.sampled_from(["", "-ib", "-r[1-3]", "x[7]"]),
    more=st.sampled_from(["", ",other1", ",b[1,3]"]),
)
@settings(max_examples=30, deadline=None)
def test_the_first_node_is_that_of_the_entrypoint(
    tmp_path_factory: pytest.TempPathFactory,
    prefix: str,
    numbers: list[str],
    suffix: str,
    more: str,
) -> None:
    nodes = f"{prefix}[{','.join(numbers)}]{suffix}{more}"
    try:
        names = expand(nodes, "SLURM_STEP_NODELIST")
    except Exception:  # noqa: BLE001 - a range that runs backwards
        return
    step = dict(
        STEP,
        SLURM_STEP_NODELIST=nodes,
        SLURM_NODEID="0",
        SLURM_STEP_NUM_TASKS=str(2 * 9),
        SLURM_STEP_TASKS_PER_NODE="2(x9)",
    )
    assert hook(tmp_path_factory.mktemp("hook"), step)["MASTER_ADDR"] == names[0]


# ---- installing


def test_install_is_what_enroot_reads_and_remove_takes_it_away(tmp_path: Path) -> None:
    (tmp_path / "hooks.d").mkdir()
    (tmp_path / "hooks.d" / "10-site.sh").write_text("#!/bin/sh\n")
    source = install.files()
    install.apply(install.plan(source, tmp_path, "user"))
    there = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    assert there == [
        "environ.d/60-toolkit.env",
        "hooks.d/10-site.sh",
        "hooks.d/60-toolkit-ranks.sh",
        "mounts.d/60-toolkit.fstab",
    ]
    assert os.access(tmp_path / "hooks.d" / "60-toolkit-ranks.sh", os.X_OK)
    again = install.plan(source, tmp_path, "user")
    assert {step.action for step in again} == {"keep"}
    install.apply(install.plan(source, tmp_path, "user", remove=True))
    assert [p.name for p in tmp_path.rglob("*")] == ["hooks.d", "10-site.sh"]
    assert install.plan(source, tmp_path, "user", remove=True) == []


def test_a_file_that_is_not_the_toolkits_stops_everything(tmp_path: Path) -> None:
    (tmp_path / "mounts.d").mkdir()
    other = tmp_path / "mounts.d" / "60-toolkit.fstab"
    other.write_text("mine\n")
    for remove in (False, True):
        with pytest.raises(UsageError, match="not the toolkit's"):
            install.plan(install.files(), tmp_path, "user", remove=remove)
    assert other.read_text() == "mine\n"


def test_the_systems_settings_are_read_as_they_are_meant(tmp_path: Path) -> None:
    install.apply(install.plan(install.files(), tmp_path, "system"))
    program = tmp_path / "bin" / "enroot"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexit 0\nconfig::init "{tmp_path}/enroot.conf"\n')
    program.chmod(0o755)
    site = find({"PATH": f"{program.parent}:{os.environ['PATH']}", "HOME": str(tmp_path)})
    assert site.settings["ENROOT_SQUASH_OPTIONS"].startswith("-comp zstd -Xcompression-level 3")
    assert site.path("ENROOT_CACHE_PATH") == Path(f"/var/tmp/enroot-cache-{os.getuid()}")
    assert not site.on("ENROOT_LOGIN_SHELL")
    assert site.credentials == tmp_path / ".config" / "enroot" / ".credentials"


def test_the_example_credentials_have_no_problem() -> None:
    text = (install.files() / "examples" / "credentials").read_text()
    assert problems(text, 0o600) == []
