"""``toolkit push`` against real registries: the digest, the lock, and every way to be refused."""

from __future__ import annotations

import base64
import json
import os
import re
import urllib.request
from typing import TYPE_CHECKING

import pytest

from toolkit.image import pin

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.docker.conftest import Bed

pytestmark = pytest.mark.timeout(1200)  # the first test builds the image, cold

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"


@pytest.fixture
def private(bed: Bed) -> Iterator[str]:
    """A small image that is named for the registry with a password."""
    bed.image("team/small:1", f"FROM {bed.base}\nLABEL org.pyg.version=2.8.1\n")
    name = f"{bed.registry_auth}/team/small:1"
    bed.client.images.get("team/small:1").tag(name)
    (bed.folder / "image.lock").unlink(missing_ok=True)
    yield name
    (bed.folder / "docker" / "config.json").unlink(missing_ok=True)


def configure(bed: Bed, **config: object) -> None:
    (bed.folder / "docker" / "config.json").write_text(json.dumps(config))


def stored(bed: Bed, password: str) -> dict[str, str]:
    return {"auth": base64.b64encode(f"{bed.user}:{password}".encode()).decode()}


def digest_at(registry: str, repository: str, tag: str) -> str:
    request = urllib.request.Request(  # the registry's own word
        f"http://{registry}/v2/{repository}/manifests/{tag}", headers={"Accept": MANIFEST}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return str(answer.headers["Docker-Content-Digest"])


def test_pushed_pulled_by_digest_and_trained_by_two_ranks(bed: Bed, image: str) -> None:
    done = bed.toolkit("push", image)
    assert done.code == 0, done.stderr
    digest = digest_at(bed.registry, "team/pyg", "1")
    assert done.stdout == f"{bed.registry}/team/pyg@{digest}\n"
    assert re.search(r"[0-9a-f]{12} (Pushed|Layer already exists)", done.stderr)
    recorded = pin.read(bed.folder)
    assert recorded
    assert (recorded.reference, recorded.digest) == (image, digest)
    assert recorded.platform == "linux/amd64"
    assert recorded.versions["torch"].startswith("2.")

    pulled = bed.client.images.pull(f"{bed.registry}/team/pyg", tag=digest)
    train = "torchrun --standalone --nproc-per-node=2 -m workloads sage --epochs 1"
    planted = "--dataset planted --num-nodes 2000 --num-edges 20000 --num-features 16"
    output = bed.inside(str(pulled.id), "sh", "-c", f"{train} {planted} 2>&1")
    assert "all ranks hold the weights" in output


def refused(bed: Bed, *arguments: str, code: int, stdin: str = "") -> str:
    done = bed.toolkit("push", *arguments, stdin=stdin)
    assert done.code == code, done.stderr
    assert done.stdout == ""
    assert pin.read(bed.folder) is None
    return done.stderr.partition("toolkit: ")[2]


def test_no_login(bed: Bed, private: str) -> None:
    message = refused(bed, private, code=77)
    assert private in message
    assert f"There is no login for {bed.registry_auth}" in message


def test_a_wrong_password(bed: Bed, private: str) -> None:
    login = (f"--username={bed.user}", "--password-stdin")
    message = refused(bed, private, *login, code=77, stdin="wrong\n")
    assert "unauthorized" in message
    assert "refused the user name and password that were given" in message


def test_case_7_4_a_given_login_wins_over_a_stale_one(bed: Bed, private: str) -> None:
    configure(bed, credsStore="none-such", auths={bed.registry_auth: stored(bed, "stale")})
    login = (f"--username={bed.user}", "--password-stdin")
    done = bed.toolkit("push", private, *login, "--json", stdin=bed.password + "\n")
    assert done.code == 0, done.stderr
    pushed = json.loads(done.stdout)
    assert pushed["reference"] == private
    assert pushed["versions"] == {"torch-geometric": "2.8.1"}


@pytest.mark.parametrize("scheme", ["", "https://"])
def test_case_7_4_a_stored_login(bed: Bed, private: str, scheme: str) -> None:
    configure(bed, auths={f"{scheme}{bed.registry_auth}": stored(bed, bed.password)})
    done = bed.toolkit("push", private)
    assert done.code == 0, done.stderr


def test_case_7_4_a_stale_stored_login_is_named(bed: Bed, private: str) -> None:
    configure(bed, auths={bed.registry_auth: stored(bed, "stale")})
    message = refused(bed, private, code=77)
    assert f"The login for {bed.registry_auth} is from {bed.folder}/docker/config.json" in message
    assert "may have expired" in message


def test_a_helper_is_asked(bed: Bed, private: str, tmp_path: Path) -> None:
    helper = tmp_path / "docker-credential-lab"
    answer = json.dumps({"Username": bed.user, "Secret": bed.password})
    helper.write_text(f"#!/bin/sh\necho '{answer}'\n")
    helper.chmod(0o700)
    configure(bed, credsStore="lab")
    done = bed.toolkit("push", private, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.code == 0, done.stderr


def test_a_missing_helper_is_named(bed: Bed, private: str) -> None:
    configure(bed, credsStore="none-such")
    message = refused(bed, private, code=77)
    assert "docker-credential-none-such, which is not installed" in message


def test_a_registry_that_is_down(bed: Bed, private: str) -> None:
    gone = "127.0.0.1:9/team/small:1"
    bed.client.images.get(private).tag(gone)
    message = refused(bed, gone, code=73)
    assert gone in message
    assert "connection refused" in message
    assert "Check that 127.0.0.1:9 is up" in message


def test_an_image_that_was_not_built(bed: Bed, private: str) -> None:
    message = refused(bed, f"{private}-none", code=73)
    assert "Build it first" in message


@pytest.mark.usefixtures("private")
def test_what_cannot_be_a_push_is_exit_2_before_anything_is_sent(bed: Bed) -> None:
    assert "not a digest" in refused(bed, f"{bed.registry}/a@sha256:{'0' * 64}", code=2)
    assert "squashfs" in refused(bed, "a.sqsh", code=2)
    assert "--password-stdin" in refused(bed, "a", f"--username={bed.user}", code=2)


def test_build_and_push_in_one(bed: Bed, private: str, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM {bed.base}\nLABEL a=b\n")
    configure(bed, auths={bed.registry_auth: stored(bed, bed.password)})
    name = private.replace("small", "at-once")
    done = bed.toolkit("build", tmp_path, f"--image={name}", "--no-smoke", "--push")
    assert done.code == 0, done.stderr
    recorded = pin.read(bed.folder)
    assert recorded
    assert done.stdout == f"{name.removesuffix(':1')}@{recorded.digest}\n"
    assert "there is no .dockerignore" in done.stderr


def test_what_fails_its_smoke_test_is_not_pushed(bed: Bed, private: str, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM {bed.base}\n")
    name = private.replace("small", "untested").replace(bed.registry_auth, bed.registry)
    done = bed.toolkit("build", tmp_path, f"--image={name}", "--push")
    assert done.code == 79
    assert pin.read(bed.folder) is None
    with pytest.raises(urllib.error.HTTPError, match="404"):
        digest_at(bed.registry, "team/untested", "1")
