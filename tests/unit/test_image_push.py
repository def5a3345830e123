"""A push is a success only with the registry's digest; every other end says what to do."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from toolkit.errors import CredentialsError, PushError, ToolkitError
from toolkit.image import pin
from toolkit.image.login import Login
from toolkit.image.push import follow

if TYPE_CHECKING:
    from pathlib import Path

DIGEST = "sha256:" + "0123456789abcdef" * 4
BEGIN: list[dict[str, object]] = [
    {"status": "The push refers to repository [reg.example.com/team/img]"},
    {"status": "Preparing", "id": "d5bb", "progressDetail": {}},
]


class Layers:
    """A view that remembers."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, int, int]] = []

    def layer(self, layer: str, status: str, done: int, total: int) -> None:
        self.seen.append((layer, status, done, total))


def push(*items: dict[str, object], login: Login | None = None, view: Layers | None = None) -> str:
    return follow(
        [*BEGIN, *items],
        "reg.example.com/team/img",
        "1",
        login or Login("reg.example.com"),
        view or Layers(),
    )


def refused(*items: dict[str, object], login: Login | None = None) -> ToolkitError:
    with pytest.raises(ToolkitError) as error:
        push(*items, login=login)
    assert "reg.example.com/team/img:1" in str(error.value)
    return error.value


def test_success_is_the_last_digest() -> None:
    view = Layers()
    digest = push(
        {"status": "Pushing", "id": "d5bb", "progressDetail": {"current": 5, "total": 10}},
        {"status": "Pushed", "id": "d5bb", "progressDetail": {}},
        {"status": f"1: digest: {DIGEST} size: 1", "progressDetail": {}},
        {"progressDetail": {}, "aux": {"Tag": "1", "Digest": DIGEST, "Size": 1}},
        view=view,
    )
    assert digest == DIGEST
    assert ("d5bb", "Pushing", 5, 10) in view.seen


def test_podman_says_the_digest_in_words() -> None:
    assert push({"status": f"latest: digest: {DIGEST} size: 583"}) == DIGEST


def test_case_9_1_an_error_in_the_stream_is_an_error() -> None:
    error = refused({"errorDetail": {"message": "unauthorized"}, "error": "unauthorized"})
    assert isinstance(error, CredentialsError)
    assert error.exit_code == 77
    assert "unauthorized" in str(error)


def test_case_9_1_a_stream_without_a_digest_is_not_confirmed() -> None:
    error = refused({"status": "Pushed", "id": "d5bb"})
    assert isinstance(error, PushError)
    assert error.exit_code == 73
    assert "not confirmed" in str(error)


def test_an_error_after_a_digest_is_an_error() -> None:
    error = refused({"aux": {"Digest": DIGEST}}, {"error": "blob upload unknown"})
    assert isinstance(error, PushError)
    assert "blob upload unknown" in str(error)


@pytest.mark.parametrize(
    "reason",
    [
        "denied: requested access to the resource is denied",
        "no basic auth credentials",
        "unauthorized: authentication required",
        "received unexpected HTTP status: 403 Forbidden",
    ],
)
def test_a_refusal_is_about_credentials_and_names_where_they_came_from(reason: str) -> None:
    assert "There is no login for reg.example.com" in str(refused({"error": reason}))
    stored = Login("reg.example.com", "docker-credential-desktop", {"username": "ci"})
    message = str(refused({"error": reason}, login=stored))
    assert "docker-credential-desktop: it may have expired" in message
    assert "docker login reg.example.com" in message


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("dial tcp 10.0.0.1:443: connect: connection refused", "is up and reachable"),
        ("http: server gave HTTP response to HTTPS client", "insecure-registries"),
        ("An image does not exist locally with the tag: reg.example.com/team/img", "toolkit build"),
    ],
)
def test_other_failures_say_what_to_do(reason: str, advice: str) -> None:
    error = refused({"error": reason})
    assert error.exit_code == 73
    assert advice in str(error)


def test_the_lock_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = pin.Pin(
        'reg.example.com/team/img:1', DIGEST, "linux/amd64", {"torch": '2.13.0+"cpu"'}
    )  # fmt: skip
    path = pin.write(written, tmp_path)
    assert pin.read(tmp_path) == written
    assert path.stat().st_mode & 0o777 == 0o644
    assert [file.name for file in tmp_path.iterdir()] == ["image.lock"]


def test_no_lock_is_none_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    assert pin.read(tmp_path) is None
    for damaged in ("reference = ", "reference = 'x'\n"):
        (tmp_path / "image.lock").write_text(damaged)
        with pytest.raises(ToolkitError, match=r"image\.lock is damaged"):
            pin.read(tmp_path)


def test_an_image_that_was_not_tested_tells_its_versions_itself() -> None:
    config = {
        "Env": ["PATH=/bin", "PYTORCH_VERSION=2.13.0"],
        "Labels": {"org.pyg.version": "2.8.1"},
    }
    assert pin.declared_versions(config) == {"torch": "2.13.0", "torch-geometric": "2.8.1"}
    assert pin.declared_versions(json.loads('{"Env": null, "Labels": null}')) == {}
