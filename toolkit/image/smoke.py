"""The smoke test: whether an image will start and train on a cluster, found out in containers.

The containers are as on a cluster: another user than root, a read-only root, no network (two ranks
in two containers have one of their own). What runs in them is :mod:`toolkit.image.checks`, which
travels in an environment variable: so it reaches engines on other machines, too, and any image.
"""

from __future__ import annotations

import base64
import io
import json
import signal
import tempfile
import time
import uuid
import zipfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.errors import UnavailableError
from toolkit.image import checks, reference
from toolkit.image.context import human
from toolkit.image.login import find
from toolkit.image.push import registry_error
from toolkit.pyz import write_entrypoint

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from docker.models.containers import Container
    from docker.models.images import Image

    from toolkit.image.engine import Engine

LIMIT_SECONDS = 600  # for all checks of one container
START_SECONDS = 120
FILE = "/tmp/toolkit-smoke.pyz"  # noqa: S108 - in the container, on a file system of its own
PACKED = "TOOLKIT_SMOKE_"  # and a number: Linux takes 128 KiB in one variable
PIECE = 64 * 1024
START = f"""\
import base64, os, sys
pieces = []
while {PACKED!r} + str(len(pieces)) in os.environ:
    pieces.append(os.environ.pop({PACKED!r} + str(len(pieces))))
with open({FILE!r}, "wb") as file:
    file.write(base64.b64decode("".join(pieces)))
os.execv(sys.executable, [sys.executable, {FILE!r}] + sys.argv[1:])
"""
SANDBOX: dict[str, Any] = {
    "user": "65534:65534",
    "read_only": True,
    "tmpfs": {"/tmp": "rw,mode=1777,size=512m"},  # noqa: S108
    "shm_size": "256m",
    "working_dir": "/tmp",  # noqa: S108
}
# torch asks for the user's name, which an image need not know.
ENVIRONMENT = {"HOME": "/tmp", "USER": "nobody", "OMP_NUM_THREADS": "1"}  # noqa: S108


@dataclass(frozen=True)
class Result:
    """One check and how it ended."""

    name: str
    ok: bool
    detail: str
    seconds: float = 0.0

    def __str__(self) -> str:
        """One line, ``ok`` or ``FAIL`` in front."""
        time_taken = f" ({self.seconds:.1f} s)" if self.seconds >= 0.1 else ""
        return f"{'ok' if self.ok else 'FAIL':5} {self.name:11} {self.detail}{time_taken}"


@dataclass
class Report:
    """All that was found out about an image."""

    image: str
    image_id: str = ""
    platform: str = ""
    size: int = 0
    start_seconds: float | None = None
    versions: dict[str, str] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)

    @property
    def failed(self) -> list[str]:
        return [result.name for result in self.results if not result.ok]

    def as_dict(self) -> dict[str, Any]:
        return {
            "image": self.image,
            "image_id": self.image_id,
            "platform": self.platform,
            "size": self.size,
            "start_seconds": self.start_seconds,
            "versions": self.versions,
            "ok": not self.failed,
            "checks": [vars(result) for result in self.results],
        }

    def junit(self) -> str:
        """For ``--junit``: a test case for each check."""
        import xml.etree.ElementTree as ET  # noqa: PLC0415

        suite = ET.Element(
            "testsuite",
            name=f"toolkit smoke {self.image}",
            tests=str(len(self.results)),
            failures=str(len(self.failed)),
        )
        for result in self.results:
            case = ET.SubElement(
                suite, "testcase", classname="smoke", name=result.name, time=str(result.seconds)
            )
            if result.ok:
                ET.SubElement(case, "system-out").text = result.detail
            else:
                ET.SubElement(case, "failure", message=result.detail)
        return ET.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def names(*, gpus: bool) -> list[str]:
    """The checks in their order."""
    inside = [name for name, _ in checks.CHECKS["all"]]
    gpu = [name for name, _ in checks.CHECKS["gpu"]] if gpus else []
    return ["platform", "start", *inside, "ddp-2", *gpu]


def smoke(engine: Engine, image: str, *, gpus: bool = False) -> Iterator[Result | Report]:
    """Test ``image``: each result as it is known, and the report at the end.

    Raises:
        UnavailableError: Where the engine neither has the image nor is told a registry's name.
        PushError: Where a registry does not give it.
        CredentialsError: Where a registry refuses to give it.
    """
    report = Report(image)
    found = _image(engine, image)
    report.image_id, report.size = str(found.id), found.attrs["Size"]
    report.platform = f"{found.attrs['Os']}/{found.attrs['Architecture']}"
    for result in _results(engine, found, report, gpus=gpus):
        report.results.append(result)
        yield result
    # A check that could not even begin has failed, too.
    done = {result.name for result in report.results}
    cause = report.failed[-1] if report.failed else ""
    for name in names(gpus=gpus):
        if name not in done:
            result = Result(name, ok=False, detail=f"not run: {cause} failed")
            report.results.append(result)
            yield result
    yield report


def _results(engine: Engine, image: Image, report: Report, *, gpus: bool) -> Iterator[Result]:
    ok = report.platform == f"linux/{engine.architecture}"
    detail = f"{report.platform}, {human(report.size)}"
    if not ok:
        detail += f"; this engine runs linux/{engine.architecture}, so nothing can be tested here"
    yield Result("platform", ok, detail)
    if not ok:
        return
    began = time.monotonic()
    ended = _run(engine, image, ["-c", "pass"], limit=START_SECONDS)
    report.start_seconds = round(time.monotonic() - began, 2)
    if ended.code != 0:
        yield Result("start", ok=False, detail=f"python3 {ended}", seconds=report.start_seconds)
        return
    yield Result("start", ok=True, detail="python3 starts", seconds=report.start_seconds)
    yield from _inside(_run(engine, image, ["-c", START, "all"]), "all", report)
    yield _two_containers(engine, image)
    if gpus:
        from docker.types import DeviceRequest  # noqa: PLC0415 - heavy

        all_gpus = DeviceRequest(count=-1, capabilities=[["gpu"]])
        ended = _run(engine, image, ["-c", START, "gpu"], device_requests=[all_gpus])
        yield from _inside(ended, "gpu", report)


@dataclass(frozen=True)
class Ended:
    """How a container ended, and what it printed."""

    code: int | None
    """None where it had to be stopped."""
    stdout: str
    stderr: str
    error: str = ""
    """Why the engine did not start it."""

    def __str__(self) -> str:
        """What happened, in the words of a result."""
        if self.error:
            return f"did not start: {self.error}"
        if self.code is None:
            return f"did not end within its time limit{self._last()}"
        if self.code > 128:
            number = self.code - 128
            known = number in signal.Signals.__members__.values()
            name = signal.Signals(number).name if known else f"signal {number}"
            hint = ", out of memory?" if name == "SIGKILL" else ""
            return f"was ended by {name}{hint}{self._last()}"
        return f"ended with code {self.code}{self._last()}"

    def _last(self) -> str:
        lines = self.stderr.strip().splitlines()
        return f": {lines[-1].strip()}" if lines else ""


def _inside(ended: Ended, role: str, report: Report) -> Iterator[Result]:
    """The results that a container printed; the check it died in failed."""
    expected = [name for name, _ in checks.CHECKS[role]]
    for line in ended.stdout.splitlines():
        item = _json(line)
        if "versions" in item:
            report.versions.update(item["versions"])
        if item.get("check") in expected:
            expected.remove(item["check"])
            yield Result(item["check"], item["ok"], item["detail"], item["seconds"])
    if expected:
        yield Result(expected[0], ok=False, detail=f"the container {ended}")


def _json(line: str) -> dict[str, Any]:
    try:
        item = json.loads(line)
    except ValueError:
        return {}
    return item if isinstance(item, dict) else {}


def _two_containers(engine: Engine, image: Image) -> Result:
    """One rank in each of two containers that know each other by name."""
    began = time.monotonic()
    tag = uuid.uuid4().hex[:8]
    hosts = [f"smoke-{tag}-{rank}" for rank in range(2)]
    ranks: list[Container | Ended] = []
    with _network(engine, f"toolkit-smoke-{tag}") as (network, error):
        if error:
            return Result("ddp-2", ok=False, detail=f"no network for two containers: {error}")
        try:
            for rank, host in enumerate(hosts):
                environment = {
                    "RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "MASTER_ADDR": hosts[0],
                    "MASTER_PORT": "29400",
                    "GLOO_SOCKET_IFNAME": "eth0",
                }
                options = {"name": host, "hostname": host, "network": network}
                command = ["-c", START, "rank"]
                ranks.append(_start(engine, image, command, environment, **options))
            ended = [_end(started, LIMIT_SECONDS) for started in ranks]
        finally:
            for started in ranks:
                _remove(started)
    seconds = time.monotonic() - began
    for rank, how in enumerate(ended):
        if how.code != 0:
            return Result("ddp-2", ok=False, detail=f"rank {rank} {how}", seconds=seconds)
    return Result("ddp-2", ok=True, detail="two ranks in two containers agree", seconds=seconds)


@contextmanager
def _network(engine: Engine, name: str) -> Iterator[tuple[str, str]]:
    """A network that leads nowhere else; its name and, where there is none, why."""
    from docker.errors import DockerException  # noqa: PLC0415 - heavy

    try:
        network = engine.client.networks.create(name, driver="bridge", internal=True)
    except DockerException as error:
        yield name, str(error)
        return
    try:
        yield name, ""
    finally:
        network.remove()


def _run(
    engine: Engine, image: Image, arguments: list[str], limit: int = LIMIT_SECONDS, **options: Any
) -> Ended:
    """Run the image's Python without a network; the container is gone afterwards."""
    options |= {"network_mode": "none", "hostname": "localhost"}
    return _end(_start(engine, image, arguments, **options), limit)


def _start(
    engine: Engine,
    image: Image,
    arguments: list[str],
    environment: Mapping[str, str] | None = None,
    **options: Any,
) -> Container | Ended:
    from docker.errors import DockerException  # noqa: PLC0415 - heavy

    text = base64.b64encode(pack()).decode()
    packed = {
        f"{PACKED}{n}": text[n * PIECE : (n + 1) * PIECE] for n in range(-(-len(text) // PIECE))
    }
    container = None
    try:
        container = engine.client.containers.create(
            str(image.id),
            arguments,
            entrypoint=["python3"],  # in place of the image's own, which pyxis does not run either
            environment={**ENVIRONMENT, **packed, **(environment or {})},
            **SANDBOX,
            **options,
        )
        container.start()
    except DockerException as error:
        if container:
            container.remove(force=True)
        return Ended(None, "", "", error=_reason(error))
    return container


def _reason(error: Exception) -> str:
    """The engine's own words, without the address of its interface."""
    return str(getattr(error, "explanation", "") or error).strip().splitlines()[-1]


def _end(started: Container | Ended, limit: int) -> Ended:
    """Wait for a container, then remove it."""
    if isinstance(started, Ended):
        return started
    import requests  # noqa: PLC0415 - heavy

    try:
        try:
            code = started.wait(timeout=limit)["StatusCode"]
        except requests.exceptions.RequestException:
            code = None
        stdout = started.logs(stdout=True, stderr=False).decode(errors="replace")
        stderr = started.logs(stdout=False, stderr=True).decode(errors="replace")
    finally:
        _remove(started)
    return Ended(code, stdout, stderr)


def _remove(started: Container | Ended) -> None:
    """Stop and remove a container; no matter if it is gone."""
    from docker.errors import NotFound  # noqa: PLC0415 - heavy

    if not isinstance(started, Ended):
        with suppress(NotFound):
            started.remove(force=True)


@cache
def pack() -> bytes:
    """The checks as one file that any Python runs, with the entrypoint's own file in it."""
    data = io.BytesIO()
    with tempfile.TemporaryDirectory() as scratch:
        entrypoint = Path(scratch, checks.ENTRYPOINT)
        write_entrypoint(entrypoint)
        with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.write(checks.__file__, "__main__.py")
            archive.write(entrypoint, checks.ENTRYPOINT)
    return data.getvalue()


def _image(engine: Engine, image: str) -> Image:
    """The image, pulled where the engine does not have it."""
    from docker.errors import DockerException, ImageNotFound  # noqa: PLC0415 - heavy

    try:
        return engine.client.images.get(image)
    except ImageNotFound:
        pass
    parsed = reference.parse(image)
    if parsed.registry is None:
        raise UnavailableError(
            f"image {image!r} is a squashfs file, which Docker cannot start: test the image it was "
            "imported from"
        )
    login = find(parsed.registry)
    version = parsed.digest or parsed.tag or "latest"
    try:
        return engine.client.images.pull(
            parsed.repository, tag=version, auth_config=dict(login.auth_config)
        )
    except DockerException as error:
        raise registry_error("pull", _reason(error), parsed.repository, version, login) from error
