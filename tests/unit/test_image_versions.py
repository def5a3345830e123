"""Pins that cannot work together are told before minutes of building are spent on them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from toolkit.errors import UsageError
from toolkit.image.versions import check_variant, conflicts, read_pins

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("pins", "variant", "told"),
    [
        ({"torch": "2.13.0"}, "cuda", None),
        ({"torch": "2.13.0"}, "cpu", None),
        ({"torch": "2.13.0+cpu"}, "cpu", None),
        ({"torch": "2.13.0+cpu"}, "cuda", "is a cpu build, but --variant is cuda"),
        ({"torch": "2.13.0+cu130"}, "cuda", None),
        ({"torch": "2.13.0+cu130"}, "cu126", "is a cu130 build"),
        ({"torch": "2.13.0", "pyg-lib": "0.5.0+pt213cu130"}, "cu130", None),
        ({"torch": "2.13.0", "pyg-lib": "0.5.0+pt213cu130"}, "cpu", "is a cu130 build, not cpu"),
        ({"torch": "2.13.0", "torch-scatter": "2.1.2+pt28cpu"}, "cpu", "is for torch 2.8"),
        ({"torch": "2.13.0", "torch-sparse": "0.6.18"}, "cpu", None),
        ({"numpy": "2.0"}, "cpu", None),
    ],
)
def test_conflicts(pins: dict[str, str], variant: str, told: str | None) -> None:
    found = conflicts(pins, variant)
    assert bool(found) is bool(told)
    assert not told or told in "; ".join(found)


def test_pins_are_read_whatever_their_spelling() -> None:
    text = "# comment\nTorch_Geometric==2.8.1\ntorch == 2.13.0 ; python_version > '3'\nrich>=13\n"
    assert read_pins(text) == {"torch-geometric": "2.8.1", "torch": "2.13.0"}


@pytest.mark.parametrize("variant", ["gpu", "CPU", "cu13", "cuda13.0", ""])
def test_an_unknown_variant_is_a_usage_error(variant: str) -> None:
    with pytest.raises(UsageError, match=re.escape(repr(variant))):
        check_variant(variant)


def test_the_dockerfile_s_versions_are_those_of_constraints_txt(
    pytestconfig: pytest.Config,
) -> None:
    root: Path = pytestconfig.rootpath
    pins = read_pins((root / "constraints.txt").read_text())
    arguments = re.findall(r"^ARG (\w+)=(.*)$", (root / "Dockerfile").read_text(), re.MULTILINE)
    for name, package in (("TORCH_VERSION", "torch"), ("PYG_VERSION", "torch-geometric")):
        assert {value for key, value in arguments if key == name} == {pins[package]}
    assert conflicts(pins, "cpu") == conflicts(pins, "cuda") == []
