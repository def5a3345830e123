"""The registry's password is in nothing that the commands print or make."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.docker.conftest import Bed

pytestmark = pytest.mark.timeout(1200)  # the first test builds the image, cold


def test_no_secret_in_outputs_files_and_layers(bed: Bed, image: str) -> None:
    small = bed.image(f"{bed.registry_auth}/team/secret:1", f"FROM {bed.base}\nLABEL a=b\n")
    given = ("--username", bed.user, "--password-stdin")
    pushed = bed.toolkit("push", small, *given, stdin=f"{bed.password}\n")
    assert pushed.code == 0, pushed.stderr
    refused = bed.toolkit("push", small, *given, stdin=f"{bed.password}wrong\n")
    assert refused.code == 77
    bed.toolkit("push", small, *given, "--dry-run", stdin=f"{bed.password}\n")
    login = f"{bed.user}:{bed.password}"
    secrets = [bed.password.encode(), base64.b64encode(login.encode())]
    assert len(bed.outputs) > 2
    printed = "\n".join(bed.outputs).encode()
    files = b"".join(file.read_bytes() for file in bed.folder.rglob("image.lock"))
    history = repr([found.history() for found in bed.client.images.list()]).encode()
    for secret in secrets:
        assert secret not in printed
        assert secret not in files
        assert secret not in history

    overlap = b""
    for piece in bed.client.images.get(image).save():
        window = overlap + piece
        assert not [secret for secret in secrets if secret in window]
        overlap = window[-100:]
