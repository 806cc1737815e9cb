"""One TCP connection of the server: whose silence is tolerated how long, and answers to what is not HTTP.

Half a request head, an answer that nobody reads and a peer that vanished without a word would each hold
a connection, and what was asked over it, for ever.  The first is watched here, since the application
hears of a request only when its head is complete; the others by the kernel (``watch_peers``).
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import socket

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from kerf_runtime.server.responses import error_body

__all__ = ["Connection", "http_config", "raise_file_limit", "watch_peers"]

logger = logging.getLogger(__name__)

HEAD_SECONDS = 30.0
"""How long the head of a request may take to arrive."""
_LINGER_SECONDS = 2.0
"""How long a peer that was refused may go on sending before it is cut off."""
_IDLE_SECONDS = 75
"""How long a connection may wait for its next request: longer than clients and proxies keep theirs, or
they would send it just when we close."""
_MOST_FILES = 65536
_KEEP_ALIVE_IDLE_SECONDS = 60
_KEEP_ALIVE_INTERVAL_SECONDS = 15
_KEEP_ALIVE_PROBES = 4


class Connection(H11Protocol):
    """uvicorn's connection with a limit for request heads, and its errors in OpenAI's shape."""

    _head_timer: asyncio.TimerHandle | None = None
    _linger_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        if self._linger_timer is not None:
            return  # it was refused
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP."""
        self._refuse(400, msg, None)

    def _watch_head(self) -> None:
        """The first byte of a head starts the clock, its end stops it; more bytes do not set it back."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_watching()
        elif (
            self._head_timer is None
            and self._linger_timer is None
            and not self.transport.is_closing()
        ):
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._head_is_late)

    def _stop_watching(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if not self.conn.trailing_data[0]:
            self.transport.close()  # opened in advance, and not a byte sent: nobody expects an answer
            return
        self._refuse(
            408,
            f"the request's head did not arrive within {HEAD_SECONDS:g} seconds. Send it at once",
            "request_timeout",
        )

    def _refuse(self, status: int, message: str, code: str | None) -> None:
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # an answer is under way: there is no room for another
            return
        body = json.dumps(error_body(message, status=status, param=None, code=code)).encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        for event in (
            h11.Response(status_code=status, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self._linger()

    def _linger(self) -> None:
        """Close once the peer has: closing with its bytes unread would take back what was just answered."""
        self._stop_watching()
        self.transport.write_eof()
        self._linger_timer = self.loop.call_later(_LINGER_SECONDS, self.transport.close)


def http_config(app: ASGIApp) -> uvicorn.Config:
    """How uvicorn serves ``app``."""
    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=2,
        server_header=False,
    )


def raise_file_limit() -> None:
    """Allow as many open files, that is connections, as the administrator does.

    The soft limit of many systems is 1024; above it no connection is accepted, a probe's neither.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(_MOST_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def watch_peers(listener: socket.socket, *, unread_seconds: float = 60.0) -> None:
    """End connections whose peer is gone or does not read; accepted sockets inherit this.

    Args:
        listener: before or after ``listen``.
        unread_seconds: how long sent bytes may remain unread.
    """
    tcp = socket.IPPROTO_TCP
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
            listener.setsockopt(tcp, socket.TCP_KEEPIDLE, _KEEP_ALIVE_IDLE_SECONDS)
            listener.setsockopt(tcp, socket.TCP_KEEPINTVL, _KEEP_ALIVE_INTERVAL_SECONDS)
            listener.setsockopt(tcp, socket.TCP_KEEPCNT, _KEEP_ALIVE_PROBES)
            listener.setsockopt(tcp, socket.TCP_USER_TIMEOUT, int(unread_seconds * 1000))
    except OSError as error:
        logger.warning(
            "this system cannot watch the peers of connections (%s): requests of clients that vanish without a "
            "word run to their end",
            error.strerror,
        )
