"""``toolkit doctor``: what is judged of which answers, and that no answer is no traceback."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
import tomllib
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.jobs import decided
from toolkit import config
from toolkit.cluster import doctor
from toolkit.cluster.doctor import FLAGS, Facts, judge, parse, pyxis_flags, with_profile
from toolkit.decide import make_spec
from toolkit.errors import UnavailableError
from toolkit.slurm import container

if TYPE_CHECKING:
    from pathlib import Path

HELP = "".join(f"      --{flag}=X  [pyxis] text\n" for flag in FLAGS if "home" not in flag)
HELP += "      --[no-]container-mount-home  [pyxis] bind mount the home directory\n"
MACHINE = {
    "host": ["login"],
    "uid": ["1000"],
    "arch": ["x86_64"],
    "namespaces": ["yes"],
    "fs.cwd": ["nfs 10000000 4096"],
    "inode.cwd": ["1"],
    "inode.home": ["2"],
    "interface": ["lo", "eth0"],
    "path.enroot": ["/usr/bin/enroot"],
    "path.scontrol": ["/usr/bin/scontrol"],
    "enroot.version": ["4.1.2"],
    "ENROOT_TEMP_PATH": ["/tmp"],
    "fs.ENROOT_TEMP_PATH": ["ext2/ext3 10000000 4096"],
    **{f"path.{tool}": ["/x"] for tool in ("mksquashfs", "unsquashfs", "parallel", "jq", "zstd")},
}
NODE = {**MACHINE, "host": ["node01"], "gpu": ["NVIDIA H100, 550.54.15"], "cuda": ["12.4"]}
CLUSTER = Facts(
    machine=MACHINE,
    srun=True,
    slurm_version="24.11.5",
    cluster="alpha",
    partitions=("gpu 4 up gpu:h100:8(S:0-1)", "cpu 2 up (null)"),
    srun_help=HELP,
    plugstack="required /usr/lib/spank_pyxis.so use_squashfuse=1 execute_entrypoint=0",
    node=NODE,
)


def found(**change: Any) -> dict[str, tuple[str, str]]:
    checks = judge(dataclasses.replace(CLUSTER, **change))
    return {check.name: (check.state, check.line()) for check in checks}


def machine(base: dict[str, list[str]], **change: str | None) -> dict[str, list[str]]:
    """Answers with some changed; ``_`` stands for a dot, None takes one away."""
    changed = {**base, **{name: [value] for name, value in change.items() if value is not None}}
    return {name: value for name, value in changed.items() if change.get(name, "") is not None}


def test_a_good_cluster_is_all_ok() -> None:
    assert {state for state, _ in found().values()} == {"ok"}
    assert not doctor.failed(judge(CLUSTER))
    assert "gpu:h100:8" in found()["GPUs"][1]


@pytest.mark.parametrize(
    ("change", "name", "state", "words"),
    [
        (
            {"slurm": "srun is not on PATH", "srun": False, "node": None},
            "Slurm",
            "ok",
            "this machine",
        ),
        ({"slurm": "does not answer", "node": None}, "Slurm", "FAIL", "SLURM_CONF"),
        ({"srun_help": "  --container=path  OCI bundle"}, "pyxis", "FAIL", "administrators"),
        ({"srun_help": HELP.replace("container-env", "x")}, "pyxis", "warn", "--container-env"),
        ({"plugstack": "required spank_pyxis.so"}, "image start", "warn", "use_squashfuse=1"),
        ({"partitions": ()}, "partitions", "warn", "account"),
        ({"partitions": ("cpu 2 up (null)",)}, "GPUs", "warn", "cannot be used"),
        ({"node": None}, "compute nodes", "warn", "--on slurm"),
        ({"node": None, "no_node": "no resources"}, "node", "FAIL", "no resources"),
        ({"node": machine(NODE, **{"path.enroot": None})}, "enroot", "FAIL", "node01"),
        ({"node": machine(NODE, **{"path.jq": None})}, "enroot's tools", "warn", "jq"),
        ({"node": machine(NODE, namespaces=None)}, "namespaces", "FAIL", "no setting says why"),
        (
            {"node": machine(NODE, uid="0", **{"sysctl.user/max_user_namespaces": "0"})},
            "namespaces",
            "FAIL",
            "user.max_user_namespaces=0",
        ),
        (
            {"node": machine(NODE, **{"fs.ENROOT_TEMP_PATH": "tmpfs 1000000 4096"})},
            "ENROOT_TEMP_PATH",
            "warn",
            "memory",
        ),
        (
            {"node": machine(NODE, **{"fs.ENROOT_TEMP_PATH": "xfs 1000 4096"})},
            "ENROOT_TEMP_PATH",
            "warn",
            "0.0 GB",
        ),
        (
            {"node": machine(NODE, hook="50-slurm-pytorch.sh", **{"path.scontrol": None})},
            "scontrol",
            "warn",
            "MASTER_ADDR",
        ),
        ({"node": machine(NODE, hook="98-nvidia.sh")}, "nvidia-container-cli", "FAIL", "GPUs"),
        ({"node": machine(NODE, **{"inode.cwd": "9"})}, "shared cwd", "FAIL", "shared storage"),
        ({"node": machine(NODE, **{"inode.home": "9"})}, "shared home", "warn", "logins"),
        (
            {"node": {**NODE, "interface": ["lo", "eth0", "eth1", "docker0"]}},
            "network",
            "warn",
            "eth0, eth1,",
        ),
        ({"node": {**NODE, "infiniband": ["mlx5_0"]}}, "network", "ok", "mlx5_0"),
        ({"no_image": "not there"}, "image", "FAIL", "not there"),
    ],
)
def test_what_is_wrong_is_told_with_its_mend(
    change: dict[str, Any], name: str, state: str, words: str
) -> None:
    checks = found(**change)
    assert checks[name][0] == state
    assert words in checks[name][1]
    others = {check: s for check, (s, _) in checks.items() if check != name and s == "FAIL"}
    assert not others


@pytest.mark.parametrize(
    ("image", "name", "state"),
    [
        ({"architecture": "arm64"}, "architecture", "FAIL"),
        ({"cuda": "12.6.1"}, "CUDA", "warn"),
        ({"cuda": "13.0"}, "CUDA", "FAIL"),
        ({"cuda": "12.4.99"}, "CUDA", None),
        ({"cuda": None, "architecture": "amd64"}, "architecture", None),
    ],
)
def test_an_image_is_held_against_the_node(
    image: dict[str, Any], name: str, state: str | None
) -> None:
    checks = found(image={"name": "img", "size": 10**9, **image})
    assert (checks[name][0] if name in checks else None) == state


answers = st.dictionaries(
    st.sampled_from([*MACHINE, *NODE, "hook", "sysctl.user/max_user_namespaces"]),
    st.lists(st.text(max_size=8), min_size=1, max_size=2),
)


@given(answers, st.none() | answers, st.text(max_size=30), st.lists(st.text(max_size=12)))
def test_no_answer_is_a_traceback(
    machine: dict[str, list[str]],
    node: dict[str, list[str]] | None,
    text: str,
    partitions: list[str],
) -> None:
    image = {"name": "i", "size": 1, "cuda": text}
    facts = Facts(
        machine=machine, node=node, srun_help=text, plugstack=text, partitions=tuple(partitions),
        image=image,
    )  # fmt: skip
    for check in [*judge(facts), *judge(dataclasses.replace(facts, slurm="none"))]:
        assert check.state in {"ok", "warn", "FAIL"}


def test_answers_are_read_line_by_line() -> None:
    assert parse("a\tx y\nb\t\ngreeting of the site\na\tz\n") == {"a": ["x y", "z"]}


def test_flags_are_not_taken_for_others_that_begin_with_them() -> None:
    assert pyxis_flags(HELP) == list(FLAGS)
    assert pyxis_flags("--container=bundle --container-image=X --container-name-x") == [
        "container-image"
    ]


# ---- the profile


def test_a_profile_is_written_beside_what_is_there() -> None:
    text = """cluster = "alpha"

[clusters.alpha]
partition = "gpu"  # ours
pyxis-flags = []

[job]
nodes = 2
"""
    made = with_profile(text, "alpha", {"pyxis-flags": ["container-image"]}, 0)
    assert "# ours" in made
    assert tomllib.loads(made) == {
        "cluster": "alpha",
        "clusters": {"alpha": {"partition": "gpu", "pyxis-flags": ["container-image"]}},
        "job": {"nodes": 2},
    }
    fresh = with_profile("", "alpha", {"pyxis-flags": ["container-image"]}, 0)
    assert tomllib.loads(fresh) == {"clusters": {"alpha": {"pyxis-flags": ["container-image"]}}}


def test_a_saved_profile_is_what_a_job_goes_by(tmp_path: Path) -> None:
    old = dataclasses.replace(CLUSTER, srun_help=HELP.replace("container-env", "x"))
    assert doctor.save(old, tmp_path / "toolkit.toml") == "alpha"
    settings = config.settings({"container_image": "a.sqsh"}, {}, tmp_path)
    spec = make_spec(settings, ["true"], explicit_command=True)

    def compose(**options: Any) -> tuple[list[str], list[str]]:
        return container.flags(decided(**options), ["A"], "s")

    flags, notes = compose(spec=spec)
    assert not any(flag.startswith("--container-env") for flag in flags)
    assert any("--container-env" in note for note in notes)
    flags, _ = compose(container_image="a.sqsh")
    assert any(flag.startswith("--container-env") for flag in flags)
    known = tuple(flag for flag in FLAGS if flag != "container-name")
    with pytest.raises(UnavailableError, match="--container-name"):
        compose(container_image="a.sqsh", container_name="n", pyxis_flags=known)


# ---- the command


def test_without_slurm_it_is_a_workstation(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "uname", "timeout", "stat", "dirname", "sed", "cat", "id", "env"):
        (programs / name).symlink_to(shutil.which(name) or name)
    env = {"PATH": str(programs), "HOME": str(tmp_path), "DOCKER_HOST": "unix:///none.sock"}
    command = [sys.executable, "-c", "from toolkit.cli import main; main()", "doctor"]
    ran = subprocess.run(
        command, check=False, env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    lines = ran.stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["warn", "engine:"],
        ["ok" if "ok   disk" in ran.stdout else "warn", "disk:"],
        ["ok", "Slurm:"],
    ]
    command.append("--json")
    shown = subprocess.run(command, check=True, env=env, cwd=tmp_path, capture_output=True)
    assert [check["name"] for check in json.loads(shown.stdout)["checks"]] == [
        "engine",
        "disk",
        "Slurm",
    ]
    assert list(tmp_path.iterdir()) == [programs]
