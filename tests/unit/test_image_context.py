"""What a build would send, and the warnings a user gets before it is sent."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import pytest

from toolkit.errors import UsageError
from toolkit.image.context import digest, human, included, root_only, scan, secret_like

if TYPE_CHECKING:
    from pathlib import Path


def write(root: Path, path: str, size: int = 1) -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as stream:
        stream.truncate(size)  # sparse: its size is what counts
    return file


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The reporter's tree of case 9-3."""
    write(tmp_path, "Docker/Dockerfile")
    write(tmp_path, "data/raw.bin", 9 * 1000**3)
    write(tmp_path, "data/keep.txt")
    write(tmp_path, "pkg/__pycache__/a.pyc")
    write(tmp_path, "pkg/a.py", 10)
    write(tmp_path, ".git/HEAD")
    write(tmp_path, ".envs/prod.env")
    (tmp_path / "loop").symlink_to(".")
    return tmp_path


IGNORE = "# comment\nDocker/\n__pycache__/\ndata\n!data/keep.txt\n"


def test_case_9_3_what_is_sent(tree: Path) -> None:
    sent = included(tree, IGNORE.splitlines()[1:], tree / "Docker/Dockerfile")
    assert "Docker/Dockerfile" in sent  # usable as the build file although its folder is ignored
    assert "data/keep.txt" in sent
    assert "data/raw.bin" not in sent
    assert "loop" in sent
    assert not any(path.startswith("loop/") for path in sent)


def test_case_9_3_warnings(tree: Path) -> None:
    (tree / ".dockerignore").write_text(IGNORE)
    context = scan(tree, tree / "Docker/Dockerfile")
    assert context.size < 1000
    text = "\n".join(context.warnings)
    assert ".envs/prod.env" in text
    assert "'__pycache__/' covers the top folder only, and pkg/__pycache__/a.pyc is sent" in text
    assert "'**/__pycache__'" in text
    assert ".git" in text
    assert "no .dockerignore" not in text

    (tree / ".dockerignore").unlink()
    context = scan(tree, tree / "Docker/Dockerfile")
    assert context.largest[0] == ("data/", 9 * 1000**3 + 1)
    text = "\n".join(context.warnings)
    assert "there is no .dockerignore" in text
    assert "the context has 9 GB; the largest: data/ (9 GB)" in text


def test_a_context_that_sends_only_what_is_copied_has_no_warning(tmp_path: Path) -> None:
    write(tmp_path, "Dockerfile")
    write(tmp_path, "src/a.py", 10)
    write(tmp_path, ".env")
    write(tmp_path, "src/__pycache__/a.pyc")
    (tmp_path / ".dockerignore").write_text("*\n!src\n**/__pycache__\n")
    context = scan(tmp_path, tmp_path / "Dockerfile")
    assert context.warnings == ()
    assert context.files == 3  # the two Docker files are sent too


def test_the_project_s_own_context_has_no_warning(pytestconfig: pytest.Config) -> None:
    root = pytestconfig.rootpath
    context = scan(root, root / "Dockerfile")
    assert context.warnings == ()
    sent = included(root, (root / ".dockerignore").read_text().splitlines(), root / "Dockerfile")
    assert "toolkit/entrypoint/world.py" in sent
    assert "toolkit/cli.py" not in sent
    assert not [path for path in sent if "__pycache__" in path]


@pytest.mark.parametrize(
    "path",
    [
        ".env", "deploy/.env.production", ".envs/prod.env", "keys/id_ed25519", "tls/server.key",
        "home/.netrc", ".docker/config.json", "a/.docker/config.json", ".aws/config", "kaggle.json",
        ".config/enroot/.credentials", ".SSH/../id_rsa", "Server.PEM", ".envs/production",
    ],
)  # fmt: skip
def test_secret_like(path: str) -> None:
    assert secret_like(path)


@pytest.mark.parametrize(
    "path",
    [
        ".env.example", "src/environment.py", "id_rsa.pub", "keyboard.py", "src/secret_santa.py",
        "config.json", "environment.yml", "tokenizer.json",
    ],
)  # fmt: skip
def test_not_secret_like(path: str) -> None:
    assert not secret_like(path)


@pytest.mark.parametrize(
    ("pattern", "warned"),
    [
        ("__pycache__", True),
        ("__pycache__/", True),
        ("*.pyc", True),
        ("**/__pycache__", False),
        ("/__pycache__", False),
        ("!__pycache__", False),
        ("pkg/__pycache__", False),
        ("*", False),
        ("build", False),
    ],
)
def test_patterns_that_cover_the_top_folder_only(pattern: str, *, warned: bool) -> None:
    assert bool(root_only([pattern], ["pkg/__pycache__/a.pyc", "build"])) is warned


def test_what_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a folder"):
        scan(tmp_path / "none", tmp_path / "Dockerfile")
    with pytest.raises(UsageError, match="no Dockerfile at"):
        scan(tmp_path, tmp_path / "Dockerfile")


def test_sizes_are_shown_as_docker_shows_them() -> None:
    assert [human(size) for size in (0, 999, 999_960, 1_140_000_000, 9 * 1000**4)] == [
        "0 B",
        "999 B",
        "1 MB",
        "1.14 GB",
        "9000 GB",
    ]


def test_a_build_is_named_by_what_it_is_made_from(tmp_path: Path) -> None:
    def made(folder: Path, **changed: str) -> str:
        files = {"Dockerfile": "FROM a", "code.py": "1", ".dockerignore": "*\n!code.py", "x": "1"}
        folder.mkdir()
        for name, text in (files | changed).items():
            (folder / name).write_text(text)
        return digest(folder, folder / "Dockerfile", {"VARIANT": "cpu"})

    first = made(tmp_path / "a")
    assert re.fullmatch("[0-9a-f]{16}", first)
    os.utime(tmp_path / "a/code.py", (1, 1))
    assert digest(tmp_path / "a", tmp_path / "a/Dockerfile", {"VARIANT": "cpu"}) == first
    assert made(tmp_path / "b", x="2") == first  # not sent, so not in the image
    assert made(tmp_path / "c", **{"code.py": "2"}) != first
    assert made(tmp_path / "d", Dockerfile="FROM b") != first
    assert digest(tmp_path / "a", tmp_path / "a/Dockerfile", {"VARIANT": "cuda"}) != first
    (tmp_path / "a/Dockerfile").write_bytes(b"FROM a # \xff")
    assert digest(tmp_path / "a", tmp_path / "a/Dockerfile", {}) != first
    (tmp_path / "a/Dockerfile").write_text("FROM a")
    (tmp_path / "a/code.py").chmod(0o755)
    assert digest(tmp_path / "a", tmp_path / "a/Dockerfile", {"VARIANT": "cpu"}) != first
