"""Build an image: what is asked for, the engine's stream, and what came out of it."""

from __future__ import annotations

import os
import re
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from toolkit.common.capture import capture
from toolkit.common.secrets import is_secret
from toolkit.errors import BuildError, UsageError
from toolkit.image import buildkit, reference, versions
from toolkit.image.buildkit import TAIL, View, short, step_failed
from toolkit.image.context import digest
from toolkit.image.pin import BUILD_ARGUMENT, BUILD_VARIABLE, PYG_LABEL

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from toolkit.image.engine import Engine

TORCH_INDEXES = "https://download.pytorch.org/whl"
GIT_LIMIT_S = 30


@dataclass(frozen=True, kw_only=True)
class BuildSpec:
    context: Path
    dockerfile: Path
    tag: str
    """``HOST/PATH:TAG``, given to the image when it is built and checked."""
    build_args: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    platform: str | None = None
    network: str | None = None
    pull: bool = False
    no_cache: bool = False
    warning: str | None = None
    """What will be missing, and need not be."""

    def argv(self) -> list[str]:
        """The docker command line that builds the same image, less the tag."""
        argv = ["docker", "build", f"--file={self.dockerfile}"]
        argv += [f"--build-arg={name}={value}" for name, value in self.build_args.items()]
        argv += [f"--label={name}={value}" for name, value in self.labels.items()]
        options = {"--platform": self.platform, "--network": self.network}
        argv += [f"{name}={value}" for name, value in options.items() if value]
        switches = {"--pull": self.pull, "--no-cache": self.no_cache}
        argv += [name for name, wanted in switches.items() if wanted]
        return [*argv, str(self.context)]


def make_spec(
    context: Path,
    name: str,
    *,
    variant: str,
    file: Path | None = None,
    base: str | None = None,
    build_args: Iterable[str] = (),
    platform: str | None = None,
    **options: Any,
) -> BuildSpec:
    """What to build, checked before anything is sent.

    Args:
        context: the folder that is sent.
        name: the image's name; its tag is ``latest`` where it has none.
        variant: ``cpu``, ``cuda``, or a CUDA version such as ``cu130``.
        file: the Dockerfile, else the one in the context.
        base: base image, or None for the Dockerfile's own.
        build_args: ``NAME=VALUE`` each, or ``NAME`` for the value of that variable here.
        platform: such as ``linux/amd64`` or ``amd64``.
        options: ``network``, ``pull`` and ``no_cache`` of the spec.

    Raises:
        UsageError: Where a value is wrong, versions cannot work together, or a secret would leak.
    """
    versions.check_variant(variant)
    repository, tag = reference.parse(name).push_target()
    arguments = build_arguments(variant, base, build_args)
    secret = [name for name, value in arguments.items() if value and is_secret(name, value)]
    if secret:
        raise UsageError(
            f"--build-arg {', '.join(secret)} looks like a secret, and the value of a build "
            "argument stays in the image's history: pip and git take theirs from files instead"
        )
    root = context.resolve()
    pins = _pins(root / "constraints.txt", arguments)
    found = versions.conflicts(pins, variant)
    if found:
        raise UsageError(f"these versions cannot work together: {'; '.join(found)}")
    labels = {"org.opencontainers.image.version": tag, **source_labels(root)}
    if "torch-geometric" in pins and not base:  # a base may bring its own
        labels[PYG_LABEL] = pins["torch-geometric"]
    dockerfile = (file or context / "Dockerfile").resolve()
    # A Dockerfile of the user's may do without, and an argument that is not used is a warning.
    if dockerfile.is_file() and BUILD_VARIABLE.encode() in dockerfile.read_bytes():
        decides = {**arguments, "platform": platform or ""}
        arguments[BUILD_ARGUMENT] = digest(root, dockerfile, decides)
    return BuildSpec(
        context=root,
        dockerfile=dockerfile,
        tag=f"{repository}:{tag}",
        build_args=arguments,
        labels=labels,
        platform=normal_platform(platform) if platform else None,
        warning=versions.without_wheels(pins, variant),
        **options,
    )


def _pins(constraints: Path, arguments: Mapping[str, str]) -> dict[str, str]:
    pins = versions.read_pins(constraints.read_text("utf-8")) if constraints.is_file() else {}
    asked = {"TORCH_VERSION": "torch", "PYG_VERSION": "torch-geometric"}
    return pins | {pin: arguments[name] for name, pin in asked.items() if name in arguments}


@dataclass(frozen=True)
class Built:
    """An image as the engine describes it."""

    image_id: str
    platform: str
    """Such as ``linux/amd64``."""
    size: int
    """In bytes."""


def build(engine: Engine, spec: BuildSpec, view: View, *, with_buildkit: bool = False) -> Built:
    """Build, compare the platform with the one asked for, and only then give the image its tag.

    Raises:
        BuildError: Where a step fails or another platform came out.
        UnavailableError: Where BuildKit is asked for and the docker command line lacks it.
    """
    import docker  # noqa: PLC0415 - heavy, and only for builds
    import requests  # noqa: PLC0415

    try:
        image_id = (
            buildkit.build(engine, spec, view) if with_buildkit else _classic(engine, spec, view)
        )
        image = engine.client.images.get(image_id)
        attrs = image.attrs
        built = Built(image_id, f"{attrs['Os']}/{attrs['Architecture']}", attrs["Size"])
        if spec.platform and not same_platform(spec.platform, built.platform):
            raise BuildError(
                f"--platform {spec.platform} was asked for, but a {built.platform} image came out: "
                "the base image that the engine has is not for that platform, or the engine cannot "
                "emulate it; pull the base for it first (--pull) or build on such a machine"
            )
        repository, _, tag = spec.tag.rpartition(":")
        image.tag(repository, tag)
    except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
        raise BuildError(f"the engine ended the build of {spec.tag}: {error}") from error
    return built


def _classic(engine: Engine, spec: BuildSpec, view: View) -> str:
    # images.build of docker-py would drop the stream's order and keep failed containers.
    stream = engine.client.api.build(
        path=str(spec.context),
        dockerfile=str(spec.dockerfile),
        buildargs=dict(spec.build_args),
        labels=dict(spec.labels),
        platform=spec.platform,
        network_mode=spec.network,
        pull=spec.pull,
        nocache=spec.no_cache,
        rm=True,
        forcerm=True,
        decode=True,
    )
    return follow(stream, view)


def follow(stream: Iterable[Mapping[str, Any]], view: View) -> str:
    """Show the classic builder's stream; return the image's id, which only this build can have.

    Raises:
        BuildError: Where a step fails, with its last lines, or the stream has no image at its end.
    """
    step, image_id = "", ""
    tail: deque[str] = deque(maxlen=TAIL)
    for item in stream:
        if "error" in item:
            raise BuildError(step_failed(step, str(item["error"]), tail))
        aux = item.get("aux")
        if isinstance(aux, dict) and "ID" in aux:
            image_id = aux["ID"]
        for line in _lines(item):
            match = re.match(r"Step (\d+)/(\d+) : (.*)", line)
            if match:
                step = f"step {match[1]}/{match[2]}, {short(match[3])}"
                tail.clear()
                view.step(int(match[1]), int(match[2]), match[3])
            else:
                tail.append(line)
                view.line(line)
    if not image_id:
        raise BuildError(step_failed(step, "the engine's stream ended without an image", tail))
    return image_id


def _lines(item: Mapping[str, Any]) -> list[str]:
    """The lines of an item: a step's output, or the state of a layer of the base being pulled."""
    if "status" in item and not item.get("progressDetail"):
        return [" ".join(str(item[key]) for key in ("id", "status") if item.get(key))]
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(item.get("stream", "")))
    return [line for line in re.split(r"[\r\n]+", text) if line.strip()]


def normal_platform(text: str) -> str:
    """``amd64``, ``x86_64`` and ``linux/amd64`` are all ``linux/amd64``.

    Raises:
        UsageError: Where it is no platform.
    """
    machine = text.lower().removeprefix("linux/")
    machine = reference.ARCHITECTURES.get(machine, machine)
    if not re.fullmatch(r"[a-z0-9_]+(/v\d)?", machine):
        raise UsageError(f"--platform {text!r}: write linux/amd64 or linux/arm64")
    return f"linux/{machine}"


def same_platform(asked: str, built: str) -> bool:
    """Whether they are one platform; a variant such as ``/v8`` is not in an image's description."""
    return asked.split("/")[:2] == built.split("/")[:2]


def build_arguments(variant: str, base: str | None, given: Iterable[str]) -> dict[str, str]:
    """The Dockerfile's arguments; those that are given win.

    Args:
        variant: ``cpu``, ``cuda``, or a CUDA version such as ``cu130``.
        base: base image, or None for the Dockerfile's own.
        given: ``NAME=VALUE`` each, or ``NAME`` for the value of that variable here.

    Raises:
        UsageError: Where one has no name, or names a variable that is not set.
    """
    found = {"VARIANT": "cpu" if variant == "cpu" else "cuda"}
    if variant not in {"cpu", "cuda"}:
        found["TORCH_INDEX"] = f"{TORCH_INDEXES}/{variant}"
    if base:
        found["BASE"] = base
    for argument in given:
        name, equals, value = argument.partition("=")
        if not equals and name in os.environ:
            value = os.environ[name]
        elif not (name and equals):
            raise UsageError(f"--build-arg {argument!r}: write NAME=VALUE, or NAME of a variable")
        found[name] = value
    return found


def platform_note(asked: str | None, built: str) -> str | None:
    """A warning where no platform was asked for and the result is not what most clusters run."""
    if asked or built == "linux/amd64":
        return None
    return (
        f"the image is for {built}, as is this engine; a cluster of another architecture cannot "
        "start it: ask for one with --platform linux/amd64"
    )


def source_labels(context: Path) -> dict[str, str]:
    """Revision and source of the code, where git knows them; ``-dirty`` where files are changed."""
    found = {}

    def git(*argv: str) -> str:
        asked = capture(["git", "-C", str(context), *argv], GIT_LIMIT_S)
        return asked.stdout.strip() if asked.ok else ""

    revision = git("rev-parse", "HEAD")
    if revision:
        dirty = "-dirty" if git("status", "--porcelain", "--", ".") else ""
        found["org.opencontainers.image.revision"] = revision + dirty
    source = without_login(git("remote", "get-url", "origin"))
    if source:
        found["org.opencontainers.image.source"] = source
    return found


def without_login(url: str) -> str:
    """A remote's URL without the user name and token that it may carry."""
    parts = urlsplit(url)
    return (
        urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])) if parts.scheme else url
    )
