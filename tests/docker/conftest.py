"""Tier docker: a real engine, two real registries and a real image, which ci/testbed makes."""

from __future__ import annotations

import ast
import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import docker
import pytest

from tests.cli import TOOLKIT
from tests.testbed import CANNOT, TESTBED, sourced

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
LIMIT = 900.0  # seconds that a command may take: a cold build fetches torch
COPIED = ("Dockerfile", ".dockerignore", "constraints.txt", "toolkit", "workloads")


@dataclass
class Ran:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str


@dataclass
class Bed:
    """The engine and the registries, and a way to run the commands against them."""

    client: docker.DockerClient
    base: str
    registry: str
    registry_auth: str
    user: str
    password: str
    folder: Path
    """Where the commands run, with a docker configuration of its own."""
    outputs: list[str] = field(default_factory=list)
    """All that the commands printed, which must hold no secret."""

    def toolkit(self, *arguments: str | Path, stdin: str = "", **env: str) -> Ran:
        """Run a command of the toolkit."""
        done = subprocess.run(
            [TOOLKIT, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT,
            cwd=self.folder,
            env={**os.environ, "DOCKER_CONFIG": str(self.folder / "docker"), **env},
        )
        self.outputs += [done.stdout, done.stderr]
        return Ran(done.returncode, done.stdout, done.stderr)

    def inside(self, image: str, *command: str) -> str:
        """What a command prints in an image, without root, a network and a writable root."""
        output: bytes = self.client.containers.run(
            image,
            list(command),
            user="65534",
            read_only=True,
            tmpfs={"/tmp": "mode=1777"},
            network_mode="none",
            hostname="localhost",
            environment={"HOME": "/tmp", "USER": "nobody", "OMP_NUM_THREADS": "1"},
            remove=True,
        )
        return output.decode()

    def image(self, name: str, dockerfile: str) -> str:
        """Build a small image from a few lines, without the toolkit."""
        context = self.folder / "inline"
        context.mkdir(exist_ok=True)
        (context / "Dockerfile").write_text(dockerfile)
        self.client.images.build(path=str(context), tag=name, rm=True, forcerm=True)
        return name


@contextmanager
def testbed_up() -> Iterator[None]:
    """The test bed, with its variables in ``os.environ``; afterwards as it was found."""
    was_up = subprocess.run([TESTBED / "status", "docker"], check=False).returncode == 0
    up = subprocess.run([TESTBED / "up", "docker"], check=False, stderr=subprocess.PIPE, text=True)
    sys.stderr.write(up.stderr)
    if up.returncode == CANNOT:
        pytest.skip(up.stderr.strip().splitlines()[-1].removeprefix("testbed: "))
    up.check_returncode()
    before = dict(os.environ)
    os.environ.update(sourced(TESTBED / "env"))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        if not was_up and os.environ.get("TOOLKIT_TESTBED_KEEP") != "1":
            subprocess.run([TESTBED / "down", "docker"], check=True)


def end_leftovers(client: docker.DockerClient) -> None:
    """Remove what an aborted run of the tests left on an engine that is up."""
    for container in client.containers.list(all=True):
        container.remove(force=True)
    for network in client.networks.list():
        if str(network.name).startswith(("run-", "toolkit-smoke-")):
            network.remove()


@pytest.fixture(scope="session")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    """The engine and the registries."""
    with testbed_up():
        client = docker.from_env()
        end_leftovers(client)
        password = Path(os.environ["TOOLKIT_TESTBED_REGISTRY_PASSWORD_FILE"]).read_text()
        folder = tmp_path_factory.mktemp("project")
        folder.chmod(0o755)
        (folder / "docker").mkdir()
        try:
            yield Bed(
                client=client,
                base=os.environ["TOOLKIT_TESTBED_BASE"],
                registry=os.environ["TOOLKIT_TESTBED_REGISTRY"],
                registry_auth=os.environ["TOOLKIT_TESTBED_REGISTRY_AUTH"],
                user=os.environ["TOOLKIT_TESTBED_REGISTRY_USER"],
                password=password,
                folder=folder,
            )
        finally:
            client.close()


def pip_settings() -> dict[str, str]:
    """pip's own settings on this machine, from its configuration and environment."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    pairs = [line.partition("=")[::2] for line in listed.splitlines()]
    return {key.rpartition(".")[2]: str(ast.literal_eval(value)) for key, value in pairs}


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """A folder over http on the loopback interface, which a build with host networking reaches."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="session")
def build_options(bed: Bed) -> Iterator[list[str]]:
    """Options of a cpu build here: pip's settings, and wheels that this machine has as files."""
    settings = pip_settings()
    arguments = {
        "PIP_INDEX_URL": settings.get("index-url"),
        "PIP_CERT": "/etc/ssl/certs/ca-certificates.crt",  # the base has this machine's bundle
        "TORCH_INDEX": os.environ.get("TORCH_INDEX"),
        # No wheel of pyg-lib is needed, so none is waited for.
        "PYG_INDEX": "",
    }
    folders = [
        Path(urlsplit(word).path)
        for word in settings.get("find-links", "").split()
        if urlsplit(word).scheme in {"", "file"}
    ]
    wheels = next((folder for folder in folders if list(folder.glob("torch-*+cpu*.whl"))), None)
    options = ["--variant=cpu", f"--base={bed.base}", "--network=host"]
    with served(wheels or bed.folder) as url:
        if wheels:
            arguments |= {"PIP_FIND_LINKS": url, "PIP_TRUSTED_HOST": "127.0.0.1", "TORCH_INDEX": ""}
        given = {name: value for name, value in arguments.items() if value is not None}
        yield options + [f"--build-arg={name}={value}" for name, value in given.items()]


@pytest.fixture(scope="session")
def context(bed: Bed) -> Path:
    """A copy of what the image is built from, so that a test can change a file."""
    folder = bed.folder / "context"
    folder.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return folder


@pytest.fixture(scope="session")
def built(bed: Bed, context: Path, build_options: list[str]) -> tuple[str, Ran]:
    """The cpu image, built and smoke-tested once; its name and what that printed."""
    name = f"{bed.registry}/team/pyg:1"
    done = bed.toolkit("build", context, f"--image={name}", "--json", *build_options)
    assert done.code == 0, done.stderr[-4000:]
    return name, done


@pytest.fixture
def image(built: tuple[str, Ran]) -> str:
    """The name of the cpu image."""
    return built[0]
