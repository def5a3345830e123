"""Where options come from and which source wins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.jobs import decided
from toolkit import config
from toolkit.errors import UsageError

FILE = """
cluster = "alpha"
[job]
nodes = 3
container-mounts = ["/data:/data"]
[clusters.alpha]
nodes = 4
partition = "gpu"
mem = 16
[clusters.beta]
partition = "debug"
"""


def read(folder: Path, text: str = FILE, **kwargs: Any) -> dict[str, Any]:
    (folder / config.FILE_NAME).write_text(text)
    kwargs = {"cli": {}, "environ": {}, **kwargs}
    return {key: s.value for key, s in config.settings(folder=folder, **kwargs).items()}


def test_the_file_wins_over_the_clusters_profile(tmp_path: Path) -> None:
    assert read(tmp_path) == {
        "nodes": 3,
        "partition": "gpu",
        "mem": "16",
        "container_mounts": ["/data:/data"],
    }


def test_a_variable_wins_over_the_file_and_an_option_over_both(tmp_path: Path) -> None:
    environ = {"TOOLKIT_NODES": "5", "TOOLKIT_CONTAINER_MOUNTS": "'/a b:/a' /c:/c"}
    found = read(tmp_path, environ=environ)
    assert found["nodes"] == 5
    assert found["container_mounts"] == ["/a b:/a", "/c:/c"]
    assert read(tmp_path, environ=environ, cli={"nodes": 6, "mem": None})["nodes"] == 6


def test_the_cluster_can_be_chosen_by_option_and_variable(tmp_path: Path) -> None:
    assert read(tmp_path, cluster="beta")["partition"] == "debug"
    assert read(tmp_path, environ={"TOOLKIT_CLUSTER": "beta"})["partition"] == "debug"


def test_a_single_profile_needs_no_choice(tmp_path: Path) -> None:
    assert read(tmp_path, "[clusters.only]\nqos = 'high'")["qos"] == "high"


def test_no_file_is_no_settings(tmp_path: Path) -> None:
    assert config.settings({}, {}, tmp_path) == {}


@pytest.mark.parametrize("old", ["mpi", "slurm", "pmi", "env", "none"])
def test_what_a_variable_of_an_option_once_said_is_passed_on(tmp_path: Path, old: str) -> None:
    environ = {"TOOLKIT_LAUNCHER": old, "TOOLKIT_NODES": ""}
    assert config.settings({}, environ, tmp_path) == {}
    job = decided(environ)
    assert job.variables()["TOOLKIT_RANKS_FROM"] == old
    assert "TOOLKIT_LAUNCHER" in job.unset


def test_the_launcher_can_be_chosen_by_its_variable(tmp_path: Path) -> None:
    environ = {"TOOLKIT_LAUNCHER": "torchrun"}
    assert config.settings({}, environ, tmp_path)["launcher"].value == "torchrun"
    job = decided(environ)
    assert "TOOLKIT_RANKS_FROM" not in job.variables()
    assert "TOOLKIT_LAUNCHER" in job.unset, "to the entrypoint it once meant something else"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[job]\nnods = 2", "did you mean 'nodes'"),
        ("[jobs]\nnodes = 2", "did you mean 'job'"),
        ("[job]\nnodes = '2'", "nodes = '2': must be a whole number"),
        ("[job]\nnodes = true", "must be a whole number"),
        ("[job]\ncontainer-mounts = '/a:/a'", "must be a list"),
        ("[job]\ncontainer-mounts = [1]", "must be a list"),
        ("job = 3", "must be a table"),
        ("cluster = 'gamma'\n[clusters.alpha]\nqos='q'", "gamma"),
        ("[job", "not valid TOML"),
    ],
)
def test_bad_files_are_named_with_key_and_remedy(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        read(tmp_path, text)
    assert config.FILE_NAME in str(caught.value)


def test_a_bad_variable_is_named_with_its_value(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="TOOLKIT_NODES=two"):
        read(tmp_path, environ={"TOOLKIT_NODES": "two"})


def test_values_of_env_are_not_part_of_any_message(tmp_path: Path) -> None:
    found = config.settings({"env": ["TOKEN=hunter2"]}, {}, tmp_path)
    assert "hunter2" not in found["env"].source
