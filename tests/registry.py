"""A registry in this process: real HTTP, images of a few files, with or without a login."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import tarfile
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"

GZIP = "application/vnd.docker.image.rootfs.diff.tar.gzip"
ZSTD = "application/vnd.oci.image.layer.v1.tar+zstd"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


class Registry:
    """``host`` is what clients write; ``asked`` has every request, as ``METHOD PATH``."""

    def __init__(self, scheme: str, login: tuple[str, str]) -> None:
        self.scheme = scheme
        self.pair = base64.b64encode(":".join(login).encode()).decode()
        self.host = ""
        self.token_host = ""
        self.asked: list[str] = []
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, tuple[str, bytes]] = {}

    def blob(self, data: bytes) -> dict[str, Any]:
        self.blobs[digest_of(data)] = data
        return {"digest": digest_of(data), "size": len(data)}

    def image(
        self,
        tag: str,
        *layers: Mapping[str, bytes] | bytes,
        architecture: str = "amd64",
        config: Mapping[str, Any] | None = None,
    ) -> str:
        """An image whose layers are made of files or compressed tars; the manifest's digest."""
        data = [layer if isinstance(layer, bytes) else tar(layer) for layer in layers]
        described = {"architecture": architecture, "os": "linux", "config": config or {}}
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {"mediaType": "x", **self.blob(json.dumps(described).encode())},
            "layers": [
                {"mediaType": ZSTD if layer.startswith(ZSTD_MAGIC) else GZIP} | self.blob(layer)
                for layer in data
            ],
        }
        return self.put(tag, MANIFEST, manifest)

    def index(self, tag: str, images: Mapping[str, str]) -> str:
        """A list of images by architecture."""
        entries = [
            {"digest": digest, "platform": {"os": "linux", "architecture": architecture}}
            for architecture, digest in images.items()
        ]
        return self.put(tag, INDEX, {"schemaVersion": 2, "mediaType": INDEX, "manifests": entries})

    def put(self, tag: str, media_type: str, manifest: Mapping[str, Any]) -> str:
        data = json.dumps(manifest).encode()
        digest = digest_of(data)
        self.manifests[tag] = self.manifests[digest] = (media_type, data)
        return digest

    def count(self, word: str) -> int:
        return sum(word in line for line in self.asked)


def tar(files: Mapping[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            member.mode = 0o755
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


class _Handler(BaseHTTPRequestHandler):
    registry: Registry

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        registry = self.registry
        registry.asked.append(f"{self.command} {self.path}")
        given = self.headers.get("Authorization", "")
        path = urlsplit(self.path).path
        if path == "/token":
            if given and given != f"Basic {registry.pair}":
                self.reply(401)
            else:
                token = "full" if given else "anonymous"
                self.reply(200, json.dumps({"token": token}).encode())
            return
        needed = {"bearer": "Bearer full", "basic": f"Basic {registry.pair}"}.get(registry.scheme)
        if needed and given != needed:
            realm = f'Bearer realm="http://{registry.token_host}/token",service="registry"'
            self.reply(
                401,
                header=(
                    "WWW-Authenticate",
                    realm if registry.scheme == "bearer" else 'Basic realm="r"',
                ),
            )
            return
        version = path.rpartition("/")[2]
        if path == "/v2/":
            self.reply(200, b"{}")
        elif "/manifests/" in path and version in registry.manifests:
            media_type, data = registry.manifests[version]
            self.reply(200, data, ("Docker-Content-Digest", digest_of(data)), media_type)
        elif "/blobs/" in path and version in registry.blobs:
            self.reply(200, registry.blobs[version])
        else:
            self.reply(404)

    def reply(
        self,
        status: int,
        data: bytes = b"",
        header: tuple[str, str] | None = None,
        content_type: str = "application/json",
    ) -> None:
        self.send_response(status)
        if header:
            self.send_header(*header)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@contextmanager
def serve(
    scheme: str = "open", login: tuple[str, str] = ("ci", "hunter2"), address: str = "127.0.0.1"
) -> Iterator[Registry]:
    """A registry: ``open``, ``basic``, or ``bearer`` with its token server at ``localhost``."""
    registry = Registry(scheme, login)
    handler = type("Handler", (_Handler,), {"registry": registry})
    with ThreadingHTTPServer((address, 0), handler) as server:
        port = server.server_address[1]
        registry.host = f"{address}:{port}"
        registry.token_host = f"localhost:{port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield registry
        finally:
            server.shutdown()
            thread.join()
