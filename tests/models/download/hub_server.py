"""A server that is shaped like the Hugging Face hub, on a loopback port, with the faults of real networks."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

from tests.patience import PATIENCE

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_right"


@dataclass
class Repository:
    """Files by name; those in ``lfs`` are kept by the other server, behind a redirect."""

    files: dict[str, bytes]
    lfs: frozenset[str] = frozenset()
    revisions: tuple[str, ...] = ("main", COMMIT)
    commit: str = COMMIT
    private: bool = False
    gated: bool = False


@dataclass
class Faults:
    """What goes wrong, each as often as its number says.

    Attributes:
        break_after: a file's connection ends after so many bytes, ``breaks`` times.
        statuses: answers to the next requests instead of the right ones.
        flip: the first byte of the next files is another one.
        stalls: after ``break_after`` bytes of a file nothing comes until ``go_on`` is set.
        surplus: bytes that are sent behind the next files.
    """

    break_after: int = 0
    breaks: int = 0
    statuses: list[int] = field(default_factory=list)
    flip: int = 0
    ignore_ranges: bool = False
    stalls: int = 0
    surplus: int = 0
    go_on: threading.Event = field(default_factory=threading.Event)


@dataclass
class Hub:
    """The server's state; ``requests`` are (path, headers) of the hub, ``kept`` those of the other server."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    faults: Faults = field(default_factory=Faults)
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    kept: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    accepted: frozenset[str] = frozenset({TOKEN})
    granted: bool = True
    endpoint: str = ""
    storage: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def downloads(self) -> list[str]:
        """Names of the files that were asked for, without the redirected half."""
        return [path.rsplit("/", 1)[1] for path, _ in self.requests if "/resolve/" in path]

    def take(self, what: str) -> bool:
        """Whether a fault that is counted strikes now."""
        with self.lock:
            left: int = getattr(self.faults, what)
            if left:
                setattr(self.faults, what, left - 1)
            return left > 0


def git_blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *arguments: object) -> None:
        """Tests look at ``hub.requests`` instead."""

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send_content(self, content: bytes) -> None:
        hub, begins = self.hub, 0
        asked = self.headers.get("Range", "")
        if asked and not hub.faults.ignore_ranges:
            begins = int(asked.removeprefix("bytes=").rstrip("-"))
        rest = content[begins:]
        if hub.take("flip"):
            rest = bytes([rest[0] ^ 1]) + rest[1:]
        if hub.take("surplus"):
            rest += b"?"
        self.send_response(206 if begins else 200)
        self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        if len(rest) > hub.faults.break_after and hub.take("breaks"):
            self.wfile.write(rest[: hub.faults.break_after])
            self.close_connection = True
            return
        if len(rest) > hub.faults.break_after and hub.take("stalls"):
            self.wfile.write(rest[: hub.faults.break_after])
            hub.faults.go_on.wait(PATIENCE)
            rest = rest[hub.faults.break_after :]
        self.wfile.write(rest)


class _HubHandler(_Handler):
    def do_GET(self) -> None:
        hub = self.hub
        hub.requests.append((self.path, dict(self.headers)))
        if hub.faults.statuses:
            return self.answer(hub.faults.statuses.pop(0), b"try again", Retry_After="0")
        for old, new in hub.renamed.items():
            if f"/{old}/" in self.path:
                return self.answer(307, Location=self.path.replace(old, new))
        parts = urlsplit(self.path).path.strip("/").split("/")
        if parts[:2] == ["api", "models"] and "revision" in parts:
            at = parts.index("revision")
            return self.list("/".join(parts[2:at]), unquote("/".join(parts[at + 1 :])))
        at = parts.index("resolve")
        return self.resolve("/".join(parts[:at]), unquote("/".join(parts[at + 2 :])))

    def allowed(self, name: str, *, content: bool) -> Repository | None:
        """The repository, unless an error was answered."""
        hub = self.hub
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if given and given not in hub.accepted:
            self.answer(401, b'{"error": "Invalid credentials"}')
            return None
        found = hub.repositories.get(name)
        if found is None or (found.private and not given):
            self.answer(404 if given else 401, b"{}", X_Error_Code="RepoNotFound")
            return None
        if found.private and not hub.granted:
            self.answer(403, b'{"error": "insufficient permission"}')
            return None
        if found.gated and content and not (given and hub.granted):
            self.answer(403 if given else 401, b"{}", X_Error_Code="GatedRepo")
            return None
        return found

    def list(self, name: str, revision: str) -> None:
        found = self.allowed(name, content=False)
        if found is None:
            return None
        if revision not in found.revisions:
            return self.answer(404, b"{}", X_Error_Code="RevisionNotFound")
        siblings = []
        for file, content in found.files.items():
            entry = {"rfilename": file, "size": len(content), "blobId": git_blob(content)}
            if file in found.lfs:
                sha256 = hashlib.sha256(content).hexdigest()
                entry |= {"lfs": {"sha256": sha256, "size": len(content), "pointerSize": 134}}
            siblings.append(entry)
        body = json.dumps({"id": name, "sha": found.commit, "siblings": siblings}).encode()
        return self.answer(200, body, Content_Type="application/json")

    def resolve(self, name: str, file: str) -> None:
        found = self.allowed(name, content=True)
        if found is None:
            return None
        if file not in found.files:
            return self.answer(404, b"{}", X_Error_Code="EntryNotFound")
        if file in found.lfs:
            return self.answer(302, Location=f"{self.hub.storage}/{name}/{file}")
        return self.send_content(found.files[file])


class _StorageHandler(_Handler):
    def do_GET(self) -> None:
        self.hub.kept.append((self.path, dict(self.headers)))
        name, file = self.path.strip("/").rsplit("/", 1)
        self.send_content(self.hub.repositories[name].files[file])


@contextmanager
def running_hub() -> Iterator[Hub]:
    """The hub and the server that keeps its large files, until the end of the block."""
    hub = Hub()
    servers = []
    for kind in (_HubHandler, _StorageHandler):
        handler = type(kind.__name__, (kind,), {"hub": hub})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
    hub.endpoint, hub.storage = (f"http://127.0.0.1:{s.server_address[1]}" for s in servers)
    # Another name for the same machine, so that the redirect leaves the hub.
    hub.storage = hub.storage.replace("127.0.0.1", "localhost")
    try:
        yield hub
    finally:
        hub.faults.go_on.set()
        for server in servers:
            server.shutdown()
            server.server_close()
