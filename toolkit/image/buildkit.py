"""BuildKit, which docker-py does not speak: through the docker command line."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import threading
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from toolkit.common.capture import capture
from toolkit.errors import BuildError, UnavailableError
from toolkit.image.engine import SILENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from toolkit.image.build import BuildSpec
    from toolkit.image.engine import Engine

TAIL = 20  # lines of a failing step that an error shows
ASK_LIMIT_S = 30
# What BuildKit says of each step beside the step's own output.
NOISE = re.compile(r"DONE|CACHED|sha256:|transferring |resolve |extracting ")


def build(engine: Engine, spec: BuildSpec, view: View) -> str:
    """Build ``spec``; return the image's id.

    Raises:
        BuildError: Where a step fails.
        UnavailableError: Where the docker command line has no BuildKit.
    """
    environ = {**os.environ, "DOCKER_BUILDKIT": "1", "DOCKER_HOST": engine.url}
    require(environ)
    with tempfile.TemporaryDirectory() as scratch:
        iidfile = Path(scratch, "iid")
        argv = spec.argv()
        argv[2:2] = ["--progress=plain", f"--iidfile={iidfile}"]
        with subprocess.Popen(
            argv, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout
            why = follow(_with_limit(process), view)
        if process.returncode or not iidfile.exists():
            raise BuildError(why)
        return iidfile.read_text(encoding="utf-8").strip()


def require(environ: Mapping[str, str]) -> None:
    """Raise UnavailableError unless the docker command line can build with BuildKit."""

    def ask(*argv: str) -> str:
        asked = capture(["docker", *argv], ASK_LIMIT_S, environ)
        return asked.stdout.strip() if asked.ok else ""

    version = ask("version", "--format", "{{.Client.Version}}")
    if not version:
        raise UnavailableError("--builder buildkit needs the docker command line, which is missing")
    # Before 23, BuildKit was part of the command line; since then it is a plugin.
    if int(version.split(".")[0]) >= 23 and not ask("buildx", "version"):
        raise UnavailableError(
            f"--builder buildkit: docker {version} has no buildx plugin; install it "
            "(docker-buildx-plugin, or docker-buildx), or leave --builder out"
        )


def _with_limit(process: subprocess.Popen[str]) -> Iterable[str]:
    """The lines of a process, which is ended where it is silent for too long."""
    assert process.stdout
    while True:
        watchdog = threading.Timer(SILENCE_SECONDS, process.kill)
        watchdog.start()
        try:
            line = process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line:
            return
        yield line.rstrip("\n")


def follow(lines: Iterable[str], view: View) -> str:
    """Show BuildKit's plain progress; return what to say if the build turns out to have failed."""
    names: dict[str, str] = {}
    output: dict[str, deque[str]] = {}
    tail: deque[str] = deque(maxlen=TAIL)
    failed = ""
    for line in lines:
        match = re.match(r"#(\d+) (.*)", line)
        if not match:
            tail.append(line)
            continue
        number, text = match[1], match[2]
        if text.startswith("["):
            names[number] = text
            view.step(int(number), 0, text)
        elif text.startswith("ERROR"):
            failed = number
            tail.append(text)
        elif not NOISE.match(text):
            text = re.sub(r"^\d+\.\d+ ", "", text)
            output.setdefault(number, deque(maxlen=TAIL)).append(text)
            view.line(text)
    if failed:
        reason = next(line for line in tail if line.startswith("ERROR"))
        step = f"step {short(names.get(failed, '#' + failed))}"
        return step_failed(step, reason.removeprefix("ERROR: "), output.get(failed, ()))
    return step_failed("", "BuildKit gave no image", tail)


# ---- what the two builders have in common


class View(Protocol):
    """Where the progress of a build is shown."""

    def step(self, number: int, total: int, text: str) -> None:
        """Show that a step has begun; ``total`` is 0 where the builder does not say."""

    def line(self, text: str) -> None:
        """Show a line that a step printed."""


def step_failed(step: str, error: str, tail: Iterable[str]) -> str:
    """The message for a build that failed at ``step`` (empty: before the first one)."""
    where = f"the build failed at {step}" if step else "the build failed before its first step"
    lines = "".join(f"\n  {line}" for line in tail)
    return f"{where}: {error.strip()}{lines and '; its last lines:'}{lines}"


def short(text: str, width: int = 100) -> str:
    """``text`` on one line, cut where it is long."""
    text = " ".join(text.split())
    return text if len(text) <= width else f"{text[: width - 1]}…"
