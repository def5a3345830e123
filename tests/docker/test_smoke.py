"""``toolkit smoke`` on real images that work, and on real ones that do not."""

from __future__ import annotations

import io
import json
import re
import tarfile
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.docker.conftest import Bed, Ran

pytestmark = pytest.mark.timeout(1200)  # the first test builds the image, cold


def failures(done: Ran) -> dict[str, str]:
    """The FAIL lines, by their check; the test failed with 79 because of them."""
    assert done.code == 79, done.stderr
    return dict(re.findall(r"^FAIL +(\S+) +(.*)$", done.stdout, re.MULTILINE))


def test_a_good_image_with_reports_for_machines(bed: Bed, image: str, tmp_path: Path) -> None:
    file = tmp_path / "smoke.xml"
    done = bed.toolkit("smoke", image, "--json", f"--junit={file}")
    assert done.code == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] is True
    assert report["versions"]["torch-geometric"] == "2.8.1"
    assert 0 < report["start_seconds"] < 60
    assert [check["name"] for check in report["checks"]][:2] == ["platform", "start"]
    assert done.stderr.count("ok   ") == len(report["checks"])
    suite = ET.fromstring(file.read_text())
    assert suite.get("failures") == "0"
    # Nothing of the test stays.
    assert bed.client.containers.list(all=True) == []
    assert not bed.client.networks.list(names=["toolkit-smoke"])


def test_an_image_without_torch(bed: Bed) -> None:
    failed = failures(bed.toolkit("smoke", bed.base))
    assert failed["torch"].startswith("ModuleNotFoundError: No module named 'torch'")
    assert "pyg" in failed
    assert "entrypoint" not in failed


def test_a_compiled_package_for_another_torch(bed: Bed, image: str) -> None:
    packages = "$(python3 -c 'import sysconfig; print(sysconfig.get_path(\"purelib\"))')"
    broken = bed.image(
        "team/mismatch:1",
        f"FROM {image}\n"
        f"RUN cd {packages} && mkdir torch_scatter-2.1.2+pt25cu121.dist-info torch_scatter \\\n"
        " && touch torch_scatter/__init__.py \\\n"
        " && printf 'Metadata-Version: 2.1\\nName: torch-scatter\\nVersion: 2.1.2+pt25cu121\\n' "
        ">torch_scatter-2.1.2+pt25cu121.dist-info/METADATA\n",
    )
    failed = failures(bed.toolkit("smoke", broken))
    assert "torch_scatter 2.1.2+pt25cu121 does not match torch 2.13.0" in failed["compiled"]


def for_arm(bed: Bed, name: str) -> str:
    """A small image whose description says arm64, as one that was built on such a machine does."""
    image = bed.client.images.get(bed.image(name, "FROM scratch\nCOPY Dockerfile /\n"))
    changed = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(b"".join(image.save(named=name)))) as old,
        tarfile.open(fileobj=changed, mode="w") as new,
    ):
        for member in old:
            data = old.extractfile(member)
            content = data.read() if data else b""
            if b'"architecture":"amd64"' in content:
                content = content.replace(b'"architecture":"amd64"', b'"architecture":"arm64"')
                member.size = len(content)
            new.addfile(member, io.BytesIO(content))
    bed.client.images.load(changed.getvalue())
    return name


def test_an_image_for_another_architecture(bed: Bed) -> None:
    failed = failures(bed.toolkit("smoke", for_arm(bed, "team/arm64:1")))
    assert "linux/arm64" in failed["platform"]
    assert "this engine runs linux/amd64" in failed["platform"]
    assert failed["torch"] == "not run: platform failed"


def test_an_image_without_python(bed: Bed) -> None:
    bare = bed.image("team/bare:1", f"FROM {bed.base}\nRUN rm /usr/bin/python3*\n")
    failed = failures(bed.toolkit("smoke", bare))
    assert "python3" in failed["start"]
    assert failed["ddp-2"] == "not run: start failed"


def test_a_version_that_lies_and_a_path_that_a_login_shell_loses(bed: Bed, image: str) -> None:
    lies = bed.image(
        "team/lies:1",
        f"FROM {image}\nENV PYTORCH_VERSION=2.0.1\nRUN rm /etc/profile.d/venv.sh\n",
    )
    failed = failures(bed.toolkit("smoke", lies))
    assert "PYTORCH_VERSION is 2.0.1" in failed["torch"]
    assert "in a login shell" in failed["python"]


def test_an_image_that_no_one_has(bed: Bed) -> None:
    done = bed.toolkit("smoke", f"{bed.registry}/team/none:1")
    assert done.code == 73
    assert f"{bed.registry}/team/none:1" in done.stderr


def test_an_engine_that_is_absent(bed: Bed) -> None:
    done = bed.toolkit("smoke", bed.base, "--engine=unix:///none.sock")
    assert done.code == 78
    assert "/none.sock is not there" in done.stderr
