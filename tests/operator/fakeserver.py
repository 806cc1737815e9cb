"""A small HTTP server on loopback that answers what a test says and keeps what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.patience import join

__all__ = ["FakeServer", "Request", "fake_server"]


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class FakeServer:
    """``answer`` gets each request and returns status and JSON (or bytes)."""

    answer: Callable[[Request], tuple[int, Any]]
    address: str = ""
    port: int = 0
    requests: list[Request] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://{self.address}:{self.port}"


@contextmanager
def fake_server(
    answer: Callable[[Request], tuple[int, Any]], *, address: str = "127.0.0.1", port: int = 0
) -> Iterator[FakeServer]:
    fake = FakeServer(answer)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _any(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            raw = self.rfile.read(length) if length else b""
            request = Request(
                self.command,
                self.path,
                dict(self.headers.items()),
                json.loads(raw) if raw else None,
            )
            fake.requests.append(request)
            status, document = fake.answer(request)
            body = document if isinstance(document, bytes) else json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PATCH = do_DELETE = _any  # noqa: N815

        def log_message(self, *arguments: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer((address, port), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    fake.address, fake.port = str(server.server_address[0]), int(server.server_address[1])
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        join(thread)
