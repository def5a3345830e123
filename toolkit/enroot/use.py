"""A job starts an imported image where there is one, and says so."""

from __future__ import annotations

import dataclasses
import os
from importlib import import_module
from typing import TYPE_CHECKING

from toolkit.enroot import site
from toolkit.enroot.images import Images, folder
from toolkit.errors import ToolkitError
from toolkit.image import reference

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from types import ModuleType

    from toolkit.config import Setting
    from toolkit.enroot.images import Imported
    from toolkit.image.reference import Reference
    from toolkit.job import JobSpec


def known(spec: JobSpec, settings: Mapping[str, Setting], cwd: Path) -> JobSpec:
    """As :func:`imported`, as far as that is known without asking a registry: by digest."""
    image = _image(spec)
    if image is None or image.digest is None:
        return spec
    found = Images(folder(settings.get("images"), cwd)).find(image.digest)
    return dataclasses.replace(spec, container_image=str(found.path)) if found else spec


def imported(
    spec: JobSpec, settings: Mapping[str, Setting], cwd: Path, *, say: Callable[[str], None]
) -> JobSpec:
    """``spec`` with the imported file as its image, where that is in the folder.

    A digest is looked for in the folder alone. A tag may have moved since the import, so the
    registry is asked what it names now, but only where that repository was ever imported.

    Args:
        spec: the job.
        settings: for ``images`` and ``import_image``, which imports first.
        cwd: the current directory.
        say: gets what the user should know.

    Raises:
        ToolkitError: Where the image was to be imported and could not be.
    """
    image = _image(spec)
    if image is None:
        return spec
    images = Images(folder(settings.get("images"), cwd))
    wanted = settings.get("import_image")
    found = images.find(image.digest) if image.digest else None
    if found is None and wanted and wanted.value:
        found = _importing().fetch(image, images, site.find(os.environ), os.environ, say=say)
    elif found is None and image.digest is None:
        found = _find(image, images, say)
    if found is None:
        return spec
    images.used(found)
    say(f"using the imported file of {image.docker()}: {found.path}")
    return dataclasses.replace(spec, container_image=str(found.path))


def _find(image: Reference, images: Images, say: Callable[[str], None]) -> Imported | None:
    """The file of what the registry has under a tag now."""
    if not images.knows(image):
        return None
    try:
        found = images.find(_importing().look_up(image, site.find(os.environ)).digest)
    except ToolkitError as error:
        say(f"{error} The imported files in {images.path} are not used.")
        return None
    if found is None:
        say(
            f"{image.docker()} is another image by now than the one in {images.path}: every node"
            " imports it; --import does that once for all"
        )
    return found


def _image(spec: JobSpec) -> Reference | None:
    """The job's image, where it is one that can be imported."""
    if spec.container_image is None:
        return None
    image = reference.parse(spec.container_image)
    return None if image.is_file or image.scheme == "dockerd" else image


def _importing() -> ModuleType:
    """Loaded where a registry is asked: HTTP and TLS are half the time of a dry run."""
    return import_module("toolkit.enroot.importing")
