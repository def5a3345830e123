"""From a registry to a squashfs file: one importer at a time, whole or not at all."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import subprocess
import threading
import time
import uuid
from collections import deque
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from toolkit.common.lock import Lock
from toolkit.common.process import Signals
from toolkit.enroot import credentials
from toolkit.enroot.images import SQUASH_OPTIONS, squashfs_problem
from toolkit.enroot.registry import OCI_MANIFEST, Registry, machine_architecture
from toolkit.errors import (
    CancelledError,
    CredentialsError,
    ImportImageError,
    ToolkitError,
    UnavailableError,
    UsageError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from toolkit.enroot.images import Images, Imported
    from toolkit.enroot.registry import Image
    from toolkit.enroot.site import Site
    from toolkit.image.reference import Reference

LIMIT_S = 4 * 3600  # a download is slow at times, but not for ever
LOCK_TIMEOUT_S = 3600.0
KILL_S = 30  # a large container is removed on the way out

#: Sizes relative to the compressed layers, of torch images, with some air: 373 MB compressed were
#: 1.2 GB unpacked and 359 MB as a squashfs file. enroot keeps each layer recompressed in its cache.
UNPACKED, CACHED, SQUASHED = 3.5, 1.2, 1.2


@dataclass(frozen=True)
class Need:
    """Space that an import takes in one folder."""

    folder: Path
    what: str
    size: int  #: bytes


def look_up(reference: Reference, site: Site) -> Image:
    """What the registry has under a reference, with the login that enroot would take.

    Raises:
        UsageError: For a file or a local engine's image.
        CredentialsError: Where the registry refuses.
        ImportImageError: For any other failure.
    """
    return _registry(reference, site).image(reference)


def look_up_details(reference: Reference, site: Site) -> dict[str, Any]:
    """Name, architecture, CUDA version and compressed size of an image in a registry.

    Raises:
        ToolkitError: As :func:`look_up`.
    """
    registry = _registry(reference, site)
    image = registry.image(reference)
    config = registry.config(reference, image)
    environ = dict(
        entry.partition("=")[::2] for entry in (config.get("config") or {}).get("Env") or []
    )
    return {
        "name": reference.docker(),
        "architecture": config.get("architecture"),
        "cuda": environ.get("CUDA_VERSION"),
        "size": image.size,
    }


def _registry(reference: Reference, site: Site) -> Registry:
    if reference.is_file or reference.registry is None or reference.scheme == "dockerd":
        msg = f"{reference.enroot()}: only an image in a registry is imported."
        raise UsageError(msg)
    text, _ = credentials.read(site.credentials)
    machines = credentials.machines(reference.registry)
    first = credentials.find(text, machines[0], reference.user)
    # Where a token server asks, its line counts; it has the same user.
    user = first.login if first else reference.user
    login = credentials.find(text, machines[-1], user) if user else None
    return Registry(reference.registry, login or first, http=site.on("ENROOT_ALLOW_HTTP"))


def fetch(
    reference: Reference,
    images: Images,
    site: Site,
    environ: Mapping[str, str],
    *,
    say: Callable[[str], None],
    srun: Sequence[str] = (),
    lock_timeout_s: float = LOCK_TIMEOUT_S,
) -> Imported:
    """The imported image of a reference; it is imported if it is not there.

    Args:
        reference: an image in a registry.
        images: the folder.
        site: enroot on this machine.
        environ: the environment of enroot.
        say: gets what the user should know.
        srun: the command in front of enroot, which runs it on a compute node.
        lock_timeout_s: how long to wait while another process imports the same image.

    Raises:
        CredentialsError: Where the registry refuses.
        ImportImageError: For any other failure; no file is left then.
        UnavailableError: Where there is no enroot.
    """
    image = look_up(reference, site)
    found = images.find(image.digest)
    if found:
        images.used(found)
        say(f"{reference.docker()} is imported already: {found.path}")
        return found
    if not srun:
        _require_tools(environ)
    try:
        images.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ImportImageError(f"{images.path} cannot be made: {error.strerror}.") from error
    target = images.file(image.digest)
    with Lock(
        target.with_name(f".{target.stem}.lock"),
        timeout_s=lock_timeout_s,
        say=say,
        needless=lambda: images.find(image.digest) is not None,
    ):
        found = images.find(image.digest)
        if found:
            say(f"{reference.docker()} was imported meanwhile: {found.path}")
            return found
        _import(reference, image, images, site=site, environ=environ, say=say, srun=srun)
    found = images.find(image.digest)
    if found is None:
        raise ImportImageError(f"{target} was removed by somebody else; import it again.")
    return found


def _import(
    reference: Reference,
    image: Image,
    images: Images,
    *,
    site: Site,
    environ: Mapping[str, str],
    say: Callable[[str], None],
    srun: Sequence[str],
) -> None:
    """Import under the lock: the only one that writes files of this digest."""
    target = images.file(image.digest)
    if target.exists():
        say(f"{target} is not whole and is imported again")
    for leftover in images.path.glob(f".{target.name}.*.part"):
        leftover.unlink(missing_ok=True)
    env = {"ENROOT_SQUASH_OPTIONS": SQUASH_OPTIONS, **environ}
    wanted = needs(image, images.path, site, elsewhere=bool(srun))
    check_space(wanted, lambda path: shutil.disk_usage(path).free, lambda path: path.stat().st_dev)
    exact = dataclasses.replace(reference, tag=None, digest=image.digest)
    say(f"importing {reference.docker()} ({image.digest}, {image.size / 1e6:.0f} MB compressed)")
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex}.part")
    begun = time.time()
    try:
        code, said = run_enroot(
            [*srun, site.program or "enroot", "import", "-o", str(part), exact.enroot()], env
        )
        if code != 0:
            raise explain(reference, image, said, srun=bool(srun))
        _settle(part)
        problem = squashfs_problem(part)
        if problem:
            raise ImportImageError(
                f"{reference.docker()}: what enroot made is no image: {problem}."
            )
        images.write_record(
            {
                "digest": image.digest,
                "index": image.index,
                "reference": reference.docker(),
                "repository": reference.repository,
                "architecture": machine_architecture(),
                "size": part.stat().st_size,
                "imported": begun,
                "squash_options": env["ENROOT_SQUASH_OPTIONS"],
            }
        )
        part.replace(target)
    except OSError as error:
        raise ImportImageError(f"{target} cannot be written: {error.strerror}.") from error
    finally:
        part.unlink(missing_ok=True)
    size = target.stat().st_size
    say(f"imported in {time.time() - begun:.0f} s: {target} ({size / 1e6:.0f} MB)")


def _settle(part: Path) -> None:
    """Have the file on the storage before its name is: a node that crashes leaves no hole."""
    with part.open("rb") as file:
        os.fsync(file.fileno())


def needs(image: Image, folder: Path, site: Site, *, elsewhere: bool) -> list[Need]:
    """The space that an import takes.

    Args:
        image: the image.
        folder: where the file goes.
        site: enroot's folders.
        elsewhere: whether enroot runs on another machine, whose own folders are not seen from here.
    """
    wanted = [Need(folder, "the image", int(image.size * SQUASHED))]
    if elsewhere:
        return wanted
    cache = site.path("ENROOT_CACHE_PATH")
    missing = sum(
        size
        for digest, size in image.layers.items()
        if not (cache / digest.removeprefix("sha256:")).exists()
    )
    temporary = site.path("ENROOT_TEMP_PATH")
    return [
        *wanted,
        Need(cache, "enroot's cache (ENROOT_CACHE_PATH)", int(missing * CACHED)),
        Need(temporary, "unpacking (ENROOT_TEMP_PATH)", int(image.size * UNPACKED)),
    ]


def check_space(
    wanted: Sequence[Need], free: Callable[[Path], int], device: Callable[[Path], int]
) -> None:
    """Raise ImportImageError where a file system has less space than is needed on it in all."""
    shared: dict[int, list[Need]] = {}
    for need in wanted:
        place = need.folder
        while not place.exists() and place != place.parent:
            place = place.parent
        shared.setdefault(device(place), []).append(dataclasses.replace(need, folder=place))
    for group in shared.values():
        size = sum(need.size for need in group)
        there = min(free(need.folder) for need in group)
        if there < size:
            parts = ", ".join(
                f"{need.size / 1e9:.1f} GB in {need.folder} for {need.what}" for need in group
            )
            msg = (
                f"there is too little space: about {size / 1e9:.1f} GB are needed and"
                f" {there / 1e9:.1f} GB are free ({parts}). Free some, set ENROOT_TEMP_PATH or"
                " ENROOT_CACHE_PATH to a larger disk, or choose another folder with --images."
            )
            raise ImportImageError(msg)


def explain(reference: Reference, image: Image, said: str, *, srun: bool) -> ToolkitError:
    """The error for what enroot printed."""
    name = reference.docker()
    last = "; ".join(line for line in said.splitlines() if "ERROR" in line or "rror:" in line)
    last = last or "; ".join(said.splitlines()[-2:]) or "it printed nothing"
    if re.search(r"\b(401|403)\b", last):
        return CredentialsError(
            f"enroot could not log in for {name}: {last}. `toolkit login --check"
            f" {reference.registry}` says why."
        )
    hint = ""
    if re.search(r"No space left|Disk quota", said):
        hint = (
            " Set ENROOT_TEMP_PATH or ENROOT_CACHE_PATH to a larger disk, or choose another folder"
            " with --images."
        )
    elif "404" in last and image.media_type == OCI_MANIFEST:
        hint = (
            " The image is in OCI format, which this registry gives only to clients that ask for"
            " it: push it in Docker's format (with skopeo: copy --format v2s2)."
        )
    elif re.search(r"Operation not permitted|unshare|nsenter", said):
        hint = " Unprivileged user namespaces may be off here; try --on slurm."
    elif srun:
        hint = " enroot ran on a compute node; look at its own temporary folder and tools there."
    return ImportImageError(f"enroot could not import {name}: {last}.{hint}")


def _require_tools(environ: Mapping[str, str]) -> None:
    path = environ.get("PATH")
    missing = [
        name
        for name in ("enroot", "curl", "jq", "parallel", "zstd", "mksquashfs")
        if shutil.which(name, path=path) is None
    ]
    if missing:
        msg = (
            f"{', '.join(missing)} is not on PATH here, which an import needs: run it on a compute"
            " node with --on slurm."
        )
        raise UnavailableError(msg)


def run_enroot(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    limit_s: float = LIMIT_S,
    echo: Callable[[str], None] = lambda _: None,
) -> tuple[int, str]:
    """Run enroot in a session of its own: without a terminal it asks for no password.

    Args:
        argv: the command.
        env: its environment.
        limit_s: how long it may take.
        echo: gets every line that it prints.

    Returns:
        Its exit code and the last lines that it printed.

    Raises:
        CancelledError: Where a signal ended it.
        ImportImageError: Where it took too long.
    """
    tail: deque[str] = deque(maxlen=20)
    with Signals() as signals:
        with subprocess.Popen(
            argv, env=dict(env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            drain = (process.stdout, tail, echo)
            reader = threading.Thread(target=_drain, args=drain, daemon=True)
            reader.start()
            end = time.monotonic() + limit_s
            while process.poll() is None and signals.caught is None and time.monotonic() < end:
                time.sleep(0.1)
            late = process.poll() is None
            if late:
                _stop(process)
            reader.join(KILL_S)
        if signals.caught is not None:
            raise CancelledError(f"cancelled by {signals.caught.name}; nothing was left.")
    if late:
        raise ImportImageError(
            f"{argv[0]} took longer than {limit_s / 3600:g} hours and was ended."
        )
    return process.returncode, "\n".join(tail)


def _stop(process: subprocess.Popen[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(KILL_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def _drain(stream: IO[str], tail: deque[str], echo: Callable[[str], None]) -> None:
    for line in stream:
        if line.strip():
            tail.append(line.rstrip())
            echo(line.rstrip())
