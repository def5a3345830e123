"""``toolkit doctor`` on a real cluster, with pyxis and without."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.testbed import run

TOOLKIT = str(Path(sys.executable).with_name("toolkit"))


def states(output: str) -> dict[str, str]:
    lines = (line.split(None, 1) for line in output.splitlines())
    return {said.partition(":")[0]: state for state, said in lines}


def test_a_cluster_with_pyxis_is_good_and_its_profile_is_used(container_image: Path) -> None:
    profile = Path(os.environ["TOOLKIT_TESTBED_SHARED"], "toolkit.toml")
    try:
        ran = run(TOOLKIT, "doctor", "--on=slurm", "--save", f"--image={container_image}")
        assert ran.returncode == 0, ran.stdout + ran.stderr
        found = states(ran.stdout)
        assert "FAIL" not in found.values()
        good = (
            "Slurm",
            "partitions",
            "GPUs",
            "pyxis",
            "enroot",
            "namespaces",
            "shared cwd",
            "image",
        )
        assert {found[name] for name in good} == {"ok"}
        assert "enroot: 4" in ran.stdout.replace("enroot: 3", "enroot: 4")
        profile.write_text(profile.read_text().replace(', "container-env"', ""))
        dry = run(TOOLKIT, "run", "--dry-run", "--on=slurm", "--image=a.sqsh", "--", "true")
        assert "--container-env=" not in dry.stdout
        assert "--container-env is unknown" in dry.stdout
    finally:
        profile.unlink(missing_ok=True)


def test_a_cluster_without_pyxis_fails_with_what_to_do(tmp_path: Path) -> None:
    conf = Path(os.environ["SLURM_CONF"])
    (tmp_path / "plugstack.conf").touch()
    other = tmp_path / "slurm.conf"
    text = conf.read_text()
    other.write_text(text.replace(f"{conf.parent}/plugstack.conf", f"{tmp_path}/plugstack.conf"))
    ran = run(TOOLKIT, "doctor", SLURM_CONF=str(other))
    assert ran.returncode == 78, ran.stdout
    assert states(ran.stdout)["Slurm"] == "ok"
    assert [line for line in ran.stdout.splitlines() if line.startswith("FAIL")] == [
        line for line in ran.stdout.splitlines() if "srun does not know --container-image" in line
    ]
    assert ran.stderr == ""


def test_json_has_the_checks_and_the_facts() -> None:
    ran = run(TOOLKIT, "doctor", "--json")
    shown = json.loads(ran.stdout)
    assert {"name", "state", "said", "mend"} == set(shown["checks"][0])
    assert shown["facts"]["cluster"] == "testbed"


def test_a_node_that_cannot_be_had_is_told() -> None:
    ran = run(TOOLKIT, "doctor", "--on=slurm", "--partition=nosuch")
    assert ran.returncode == 78
    assert states(ran.stdout)["node"] == "FAIL"
    assert "nosuch" in ran.stdout or "partition" in ran.stdout
