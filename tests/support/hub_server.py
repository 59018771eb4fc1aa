"""A hub on this machine: a server of the protocol that huggingface_hub speaks, which can be told to misbehave."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = 4096
"""Files of that many bytes or more are kept as LFS objects, known by their SHA-256, on another host."""


@dataclass
class Trouble:
    """What goes wrong. Counts go down as it happens."""

    drops: list[int] = field(default_factory=list)
    """For each of the next transfers of a large file: bytes to send before the connection breaks."""
    status: int | None = None
    """Every answer has this status."""
    error_code: str | None = None
    """X-Error-Code with that status."""
    failures: int | None = None
    """How many answers have it; None: all."""
    damaged: dict[str, int] = field(default_factory=dict)
    """Path -> how many transfers of it have a wrong first byte."""
    ignores_ranges: bool = False
    lists_names_only: bool = False
    """No sizes and checksums."""
    stalls_after: int | None = None
    """Transfers of large files that are longer stop after that many bytes, until the client goes away."""
    stalled: threading.Event = field(default_factory=threading.Event)


@dataclass
class FakeHub:
    """The repositories of the hub, what goes wrong, and what was asked."""

    repositories: dict[str, dict[str, bytes]]
    licence: str = "gemma"
    commit: str = COMMIT
    trouble: Trouble = field(default_factory=Trouble)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    """(method, path, Range header) of each request."""
    tokens: list[str | None] = field(default_factory=list)
    """The Authorization header of each request."""
    endpoint: str = ""

    def transfers(self, path: str) -> list[str | None]:
        """The Range headers of all requests for the content of a large file."""
        got = [(asked, sent) for method, asked, sent in self.requests if method == "GET" and asked.startswith("/objects/")]
        return [sent for asked, sent in got if asked.endswith(path)]


def file_facts(path: str, content: bytes) -> dict[str, Any]:
    """One entry of a model's `siblings`."""
    git_id = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    facts: dict[str, Any] = {"rfilename": path, "size": len(content), "blobId": git_id}
    if len(content) >= LARGE:
        facts["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return facts


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(send_body=False)

    def do_GET(self) -> None:
        self._answer(send_body=True)

    def _answer(self, send_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        self.hub.tokens.append(self.headers.get("Authorization"))
        trouble = self.hub.trouble
        if trouble.status is not None and trouble.failures != 0:
            if trouble.failures is not None:
                trouble.failures -= 1
            code = {"X-Error-Code": trouble.error_code} if trouble.error_code else {}
            return self._send(trouble.status, b"{}", code, send_body)
        for pattern, answer in (
            (r"/api/models/([^/]+/[^/]+)/revision/(.+)", self._model),
            (r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self._resolve),
            (r"/objects/([^/]+/[^/]+)/(.+)", self._object),
        ):
            if found := re.fullmatch(pattern, path):
                return answer(*found.groups(), send_body)
        self._send(404, b"{}", {}, send_body)

    def _known(self, repository: str, revision: str, send_body: bool) -> dict[str, bytes] | None:
        files = self.hub.repositories.get(repository)
        if files is None:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, send_body)
        elif revision not in ("main", self.hub.commit):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, send_body)
            return None
        return files

    def _model(self, repository: str, revision: str, send_body: bool) -> None:
        files = self._known(repository, revision, send_body)
        if files is None:
            return
        siblings = [file_facts(path, content) for path, content in files.items()]
        if self.hub.trouble.lists_names_only:
            siblings = [{"rfilename": path} for path in files]
        facts = {
            "id": repository,
            "sha": self.hub.commit,
            "siblings": siblings,
            "cardData": {"license": self.hub.licence},
            "tags": [],
        }
        self._send(200, json.dumps(facts).encode(), {"Content-Type": "application/json"}, send_body)

    def _resolve(self, repository: str, revision: str, path: str, send_body: bool) -> None:
        files = self._known(repository, revision, send_body)
        if files is None:
            return
        if path not in files:
            return self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"}, send_body)
        facts = file_facts(path, files[path])
        headers = {"X-Repo-Commit": self.hub.commit, "ETag": f'"{facts["blobId"]}"'}
        if "lfs" not in facts:
            return self._content(path, files[path], headers, send_body)
        headers |= {
            "X-Linked-Etag": f'"{facts["lfs"]["sha256"]}"',
            "X-Linked-Size": str(facts["size"]),
            # Another host, as far as HTTP goes: nothing secret may be sent there.
            "Location": f"http://localhost:{self.server.server_address[1]}/objects/{repository}/{path}",
        }
        self._send(302, b"", headers, send_body)

    def _object(self, repository: str, path: str, send_body: bool) -> None:
        self._content(path, self.hub.repositories[repository][path], {"Accept-Ranges": "bytes"}, send_body)

    def _content(self, path: str, content: bytes, headers: Mapping[str, str], send_body: bool) -> None:
        trouble = self.hub.trouble
        if trouble.damaged.get(path, 0) > 0:
            trouble.damaged[path] -= 1
            content = bytes([content[0] ^ 255]) + content[1:]
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if asked is None or trouble.ignores_ranges:
            self._send(200, content, dict(headers), send_body, drop=len(content) >= LARGE)
            return
        start = int(asked[1])
        if start >= len(content):
            return self._send(416, b"", {"Content-Range": f"bytes */{len(content)}"}, send_body)
        given = {**headers, "Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
        self._send(206, content[start:], given, send_body, drop=True)

    def _send(self, status: int, body: bytes, headers: Mapping[str, str], send_body: bool, drop: bool = False) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not send_body:
            return
        if drop and self.hub.trouble.drops:
            self.wfile.write(body[: self.hub.trouble.drops.pop(0)])
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(2)
            return
        stall = self.hub.trouble.stalls_after
        if drop and stall is not None and stall < len(body):
            self.wfile.write(body[:stall])
            self.wfile.flush()
            self.hub.trouble.stalled.set()
            self.rfile.read(1)  # until the client goes away
            self.close_connection = True
            return
        self.wfile.write(body)


@contextmanager
def serving(repositories: dict[str, dict[str, bytes]]) -> Iterator[FakeHub]:
    """A running hub that holds these repositories: OWNER/NAME -> path -> content."""
    hub = FakeHub(repositories)
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
