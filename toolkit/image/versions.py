"""Whether the pinned torch, CUDA and PyG wheels can work together, said before a build starts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from toolkit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

# The builds of PyG's compiled packages, by torch's version (https://data.pyg.org/whl). PyTorch's
# own indexes have more; a version that is not here is not judged.
PYG_WHEELS = {
    "2.6": {"cpu", "cu118", "cu124", "cu126"},
    "2.7": {"cpu", "cu118", "cu126", "cu128"},
    "2.8": {"cpu", "cu126", "cu128", "cu129"},
    "2.9": {"cpu", "cu126", "cu128", "cu130"},
    "2.13": {"cpu", "cu126", "cu130", "cu132"},
}
# Compiled against one torch and one CUDA each, and named for both: 0.5.0+pt213cu130.
COMPILED = ("pyg-lib", "torch-scatter", "torch-sparse", "torch-cluster", "torch-spline-conv")
LOCAL = re.compile(r"pt(?P<major>\d)(?P<minor>\d+)(?P<build>cpu|cu\d+)")

VARIANT = re.compile(r"cpu|cuda|cu\d{3}")


def read_pins(text: str) -> dict[str, str]:
    """The ``name==version`` lines of a requirements or constraints file, names normalised."""
    pins = {}
    for line in text.splitlines():
        match = re.match(r"\s*([A-Za-z0-9._-]+)\s*(?:\[[^\]]*\])?\s*==\s*([^\s;#]+)", line)
        if match:
            pins[re.sub(r"[-_.]+", "-", match[1]).lower()] = match[2]
    return pins


def check_variant(variant: str) -> None:
    """Raise UsageError unless ``variant`` is ``cpu``, ``cuda`` or a CUDA version like ``cu130``."""
    if not VARIANT.fullmatch(variant):
        raise UsageError(f"--variant {variant!r}: must be cpu, cuda, or a CUDA such as cu130")


def conflicts(pins: Mapping[str, str], variant: str) -> list[str]:
    """What cannot work together in these pins; one sentence each.

    Args:
        pins: versions by normalised package name.
        variant: ``cpu``, ``cuda`` (PyPI's own build of torch) or a CUDA version such as ``cu130``.
    """
    torch = pins.get("torch")
    if not torch:
        return []
    found = []
    version, _, local = torch.partition("+")
    minor = _minor(version)
    if local and not _same_build(local, variant):
        found.append(f"torch=={torch} is a {local} build, but --variant is {variant}")
    wheels = PYG_WHEELS.get(minor)
    if wheels and variant != "cuda" and variant not in wheels:
        found.append(
            f"PyG has wheels for torch {minor} with {', '.join(sorted(wheels))}, not {variant}"
        )
    for name in COMPILED:
        match = LOCAL.search(pins.get(name, ""))
        if not match:
            continue
        for_torch = f"{match['major']}.{match['minor']}"
        if for_torch != minor:
            found.append(f"{name}=={pins[name]} is for torch {for_torch}, but torch is {version}")
        if not _same_build(match["build"], variant):
            found.append(f"{name}=={pins[name]} is a {match['build']} build, not {variant}")
    return found


def without_wheels(pins: Mapping[str, str], variant: str) -> str | None:
    """A sentence where PyG has no compiled packages for this torch and CUDA; it works without."""
    minor = _minor(pins.get("torch", ""))
    builds = PYG_WHEELS.get(minor, {variant})
    if variant == "cuda" or variant in builds:
        return None
    known = ", ".join(sorted(builds))
    return f"PyG has wheels for torch {minor} with {known}, not {variant}: pyg-lib will be missing"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _same_build(build: str, variant: str) -> bool:
    return build.startswith("cu") if variant == "cuda" else build == variant
