"""A reverse proxy between operator and API server that counts calls and kills after the n-th.

The n-th call is forwarded and has its effect; its answer never reaches the operator, which is the worst
moment to die.
"""

from __future__ import annotations

import http.client
import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from kerf_operator.client import Connection

__all__ = ["CountingProxy"]

_HOP = {"connection", "transfer-encoding", "content-length", "keep-alive", "host"}


class CountingProxy:
    """Forwards to the API server of ``connection``.

    Args:
        counts: which calls count (method, path).
        last: number of the counted call after which ``kill`` is called.
    """

    def __init__(
        self, connection: Connection, *, counts: Callable[[str, str], bool], last: int
    ) -> None:
        self.calls: list[str] = []
        self.kill: Callable[[], None] = lambda: None
        self.killed = threading.Event()
        self._counts, self._last = counts, last
        self._lock = threading.Lock()
        self._upstream = urlsplit(connection.server)
        configuration = connection.configuration
        self._tls = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
        self._tls.load_cert_chain(configuration.cert_file, configuration.key_file)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()

    def write_kubeconfig(self, path: Path) -> Path:
        """A kubeconfig that leads through the proxy."""
        host, port = self._server.server_address[:2]
        entry: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "proxy",
            "clusters": [{"name": "proxy", "cluster": {"server": f"http://{host}:{port}"}}],
            "users": [{"name": "proxy", "user": {}}],
            "contexts": [{"name": "proxy", "context": {"cluster": "proxy", "user": "proxy"}}],
        }
        path.write_text(yaml.safe_dump(entry))
        return path

    def _forward(self, method: str, path: str, headers: dict[str, str], body: bytes | None) -> Any:
        """One call to the API server; None when it was the last one the operator may make."""
        with self._lock:
            if self.killed.is_set():
                return None
            upstream = http.client.HTTPSConnection(
                str(self._upstream.hostname), self._upstream.port, context=self._tls, timeout=60
            )
            upstream.request(method, path, body=body, headers=headers)
            response = upstream.getresponse()
            if self._counts(method, path):
                self.calls.append(f"{method} {path}")
                if len(self.calls) >= self._last:
                    self.kill()
                    self.killed.set()
                    upstream.close()
                    return None
            return response

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _any(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length) if length else None
                headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP}
                response = proxy._forward(self.command, self.path, headers, body)
                if response is None:
                    self.close_connection = True
                    return
                self.send_response(response.status)
                for name, value in response.getheaders():
                    if name.lower() not in _HOP:
                        self.send_header(name, value)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                try:
                    while chunk := response.read1(65536):
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
                        self.wfile.flush()
                    self.wfile.write(b"0\r\n\r\n")
                except (OSError, http.client.HTTPException):
                    self.close_connection = True  # one side has gone, so does the other
                finally:
                    response.close()

            do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = _any  # noqa: N815

            def log_message(self, *arguments: object) -> None:
                """Quiet."""

        return Handler
