"""A small server that speaks the hub's protocol on localhost: what a model's page and its files need, with ranges."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + 34 * "0"
BELOW = {
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "modules.json": b'[{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]',
    "1_Pooling/config.json": b'{"pooling_mode_mean_tokens": true}',
    "2_Dense/config.json": b"{}",
    "2_Dense/model.safetensors": b"a matrix",
    "1_LogitScore/config.json": b'{"true_token_id": 7}',
}
"""What embeddings, rankings and templates with names have in folders of their own, as files of a repository."""


@dataclass
class Repo:
    """Files by path. ``large``: those kept by SHA-256, as the hub keeps weights; the others have git's digest."""

    files: dict[str, bytes]
    gated: bool = False
    large: tuple[str, ...] = (".gguf", ".safetensors")

    def digest(self, path: str) -> str:
        data = self.files[path]
        if path.endswith(self.large):
            return hashlib.sha256(data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Hub:
    """Repositories by name; ``broken_after`` ends each answer with a file's contents after so many bytes of it, so many
    times; ``damaged`` changes a byte of what is sent; ``status`` answers everything with this error. ``sent`` counts bytes of
    large files, ``ranges`` tells where answers began."""

    repos: dict[str, Repo]
    broken_after: int | None = None
    breaks: int = 0
    damaged: bool = False
    ignores_ranges: bool = False
    status: int | None = None
    sent: int = 0
    ranges: list[int] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def __enter__(self) -> Hub:
        hub = self

        class Handler(_Handler):
            served = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"


class _Handler(BaseHTTPRequestHandler):
    served: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub = self.served
        path = unquote(urlsplit(self.path).path)
        hub.asked.append(f"{self.command} {path}")
        if hub.status is not None:
            self.fault(hub.status, "")
            return
        parts = path.strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        name = "/".join(parts[2:4] if api else parts[:2])
        repo = hub.repos.get(name)
        if repo is None:
            self.fault(401, "RepoNotFound")
        elif api:
            self.page(name, repo)
        elif repo.gated:
            self.fault(403, "GatedRepo")
        elif parts[3] not in ("main", COMMIT):
            self.fault(404, "RevisionNotFound")
        elif (file := "/".join(parts[4:])) not in repo.files:
            self.fault(404, "EntryNotFound")
        else:
            self.contents(repo, file)

    def page(self, name: str, repo: Repo) -> None:
        siblings = [
            {"rfilename": path, "size": len(data), "blobId": repo.digest(path)} for path, data in repo.files.items()
        ]
        text = json.dumps(
            {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "tags": [], "downloads": 0}
        )
        self.answer(200, text.encode(), {"Content-Type": "application/json"})

    def contents(self, repo: Repo, file: str) -> None:
        hub, data, digest = self.served, repo.files[file], repo.digest(file)
        large = file.endswith(repo.large)
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{digest}"', "Accept-Ranges": "bytes"}
        if large:
            headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data))}
        start, status = 0, 200
        asked = self.headers.get("Range")
        if asked and not hub.ignores_ranges:
            start, status = int(asked.removeprefix("bytes=").partition("-")[0]), 206
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        body = data[start:]
        if self.command == "GET" and large:
            hub.ranges.append(start)
            hub.sent += len(body)
            if hub.damaged:
                body = body[:-1] + bytes([body[-1] ^ 1])
            if hub.broken_after is not None and hub.breaks > 0:
                hub.breaks -= 1
                self.answer(status, body[: hub.broken_after], headers | {"Content-Length": str(len(body))})
                self.close_connection = True
                return
        self.answer(status, body, headers)

    def fault(self, status: int, code: str) -> None:
        self.answer(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code, "Content-Type": "application/json"})

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
