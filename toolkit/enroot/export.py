"""From a local engine's image to a squashfs file that enroot and pyxis start like an imported one.

The engine's tar is passed on to ``mksquashfs`` as it comes: nothing is unpacked, so no root is
needed and modes stay. What enroot wants to know of an image is in four files of its ``/etc``:
``environment``, ``fstab`` (volumes), ``rc`` (working directory, entrypoint and command) and
``rc.local``, which ``rc`` reads first; pyxis writes its own there to leave the entrypoint out.
"""

from __future__ import annotations

import io
import shlex
import shutil
import subprocess
import tarfile
import uuid
from typing import IO, TYPE_CHECKING, Any, cast

from toolkit.enroot.images import SQUASH_OPTIONS, squashfs_problem
from toolkit.enroot.importing import SQUASHED, Need, check_space
from toolkit.errors import ImportImageError, UnavailableError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from toolkit.image.engine import Engine

BLOCK = 1 << 20


def files(config: Mapping[str, Any]) -> dict[str, str]:
    """The four files, by path in the image.

    Args:
        config: the image's configuration, with Docker's keys ``Env``, ``WorkingDir``, and so on.
    """
    environ = "".join(f"{entry}\n" for entry in config.get("Env") or [])
    fstab = "".join(
        f"${{ENROOT_ROOTFS}}{volume} {volume} none x-create=dir,bind,rw,nosuid,nodev\n"
        for volume in sorted(config.get("Volumes") or {})
    )
    return {
        "etc/environment": environ,
        "etc/fstab": fstab,
        "etc/rc": _rc(config),
        "etc/rc.local": "# Read by /etc/rc when the container starts.\n",
    }


def _rc(config: Mapping[str, Any]) -> str:
    workdir = shlex.quote(config.get("WorkingDir") or "/")
    entrypoint = shlex.join(config.get("Entrypoint") or [])
    command = shlex.join(config.get("Cmd") or []) or ("" if entrypoint else "/bin/sh")
    labels = [
        f"# {name} {value}".replace("\n", " ")
        for name, value in sorted((config.get("Labels") or {}).items())
    ]
    lines = [
        *labels,
        f"mkdir -p {workdir} 2>/dev/null",
        f"cd {workdir} || exit 1",
        "unset OLDPWD",
        "if [ -s /etc/rc.local ]; then . /etc/rc.local; fi",
        f"if [ $# -eq 0 ]; then set -- {command}; fi".replace("set -- ;", ":;"),
        f'exec {entrypoint} "$@"',
    ]
    return "\n".join([*lines, ""])


def rewrite(source: IO[bytes], target: IO[bytes], config: Mapping[str, Any]) -> None:
    """Copy an engine's tar, without what the engine left, and with enroot's four files.

    Raises:
        tarfile.TarError: Where the source is cut short.
    """
    added = files(config)
    workdir = (config.get("WorkingDir") or "/").strip("/")
    seen: set[str] = set()
    with (
        tarfile.open(fileobj=source, mode="r|") as read,
        tarfile.open(fileobj=target, mode="w|", format=tarfile.PAX_FORMAT) as written,
    ):
        for member in read:
            name = member.name.removeprefix("./").strip("/")
            if name in added or name == ".dockerenv" or name.startswith("dev/"):
                continue
            seen.add(name)
            written.addfile(member, read.extractfile(member) if member.isreg() else None)
        for folder in _missing(("etc", workdir), seen):
            made = tarfile.TarInfo(folder)
            made.type, made.mode = tarfile.DIRTYPE, 0o755
            written.addfile(made)
        for name, text in added.items():
            made = tarfile.TarInfo(name)
            made.size, made.mode = len(text.encode()), 0o644
            written.addfile(made, io.BytesIO(text.encode()))


def _missing(folders: Iterable[str], seen: set[str]) -> Iterator[str]:
    """Each folder and those above it that are not there, from the top."""
    for folder in filter(None, folders):
        parts = folder.split("/")
        for count in range(1, len(parts) + 1):
            name = "/".join(parts[:count])
            if name not in seen:
                seen.add(name)
                yield name


def export(engine: Engine, image: str, target: Path, *, force: bool = False) -> int:
    """Write an image of the engine's as ``target``, whole or not at all; its size in bytes.

    Raises:
        UsageError: Where the target is there already, or its name is not a squashfs file's.
        UnavailableError: Where there is no mksquashfs, or the engine has no such image.
        ImportImageError: Where it fails.
    """
    import docker  # noqa: PLC0415 - heavy
    import requests  # noqa: PLC0415

    if target.suffix != ".sqsh":
        raise UsageError(f"--output {target}: pyxis knows an image by its ending, .sqsh.")
    if target.exists() and not force:
        raise UsageError(f"--output {target} exists; --force replaces it.")
    if shutil.which("mksquashfs") is None:
        raise UnavailableError("mksquashfs is not on PATH: install squashfs-tools 4.5 or newer.")
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex}.part")
    api = engine.client.api
    container = None
    try:
        found = engine.client.images.get(image)
        size = int(found.attrs.get("Size") or 0)
        check_space(
            [Need(target.parent, "the image", int(size * SQUASHED / 3))],
            lambda path: shutil.disk_usage(path).free,
            lambda path: path.stat().st_dev,
        )
        # Never started: the command is there because an engine asks for one.
        container = api.create_container(image, command=["true"])["Id"]
        stream = api.export(container, chunk_size=BLOCK)
        to_squashfs(cast("IO[bytes]", _Stream(iter(stream))), part, found.attrs.get("Config") or {})
        part.replace(target)
    except docker.errors.ImageNotFound as error:
        raise UnavailableError(f"{engine.name} has no image {image}: build or pull it.") from error
    except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
        raise ImportImageError(f"{image} could not be exported: {error}.") from error
    except OSError as error:
        raise ImportImageError(f"{target} cannot be written: {error.strerror}.") from error
    finally:
        part.unlink(missing_ok=True)
        if container:
            api.remove_container(container, force=True)
    return target.stat().st_size


def to_squashfs(source: IO[bytes], part: Path, config: Mapping[str, Any]) -> None:
    """Make a squashfs file of an engine's tar.

    Raises:
        ImportImageError: Where that fails.
    """
    # Not sqfstar, whose 4.5.1 takes no compression level.
    argv = ["mksquashfs", "-", str(part), "-tar", *SQUASH_OPTIONS.split(), "-all-root"]
    argv += ["-quiet", "-no-progress"]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        cut = ""
        try:
            rewrite(source, process.stdin, config)
            process.stdin.close()
        except BrokenPipeError:
            pass  # mksquashfs says why
        except tarfile.TarError as error:
            cut = f"the engine's stream is damaged ({error})"
            process.kill()
        said = process.stderr.read().decode(errors="replace").strip().splitlines()
    if cut or process.returncode != 0:
        reason = cut or (said[-1] if said else f"mksquashfs ended with {process.returncode}")
        raise ImportImageError(f"{part.parent} got no image: {reason}.")
    problem = squashfs_problem(part)
    if problem:
        raise ImportImageError(f"what mksquashfs made is no image: {problem}.")


class _Stream(io.RawIOBase):
    """The engine's chunks as a file."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._left = b""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        parts = [self._left]
        have = len(self._left)
        while size < 0 or have < size:
            chunk = next(self._chunks, b"")
            if not chunk:
                break
            parts.append(chunk)
            have += len(chunk)
        whole = b"".join(parts)
        end = len(whole) if size < 0 else size
        self._left = whole[end:]
        return whole[:end]
