"""Names every request and says in one line what became of it.  The outermost middleware.

The line is written to the log ``kerf_runtime.access`` when the request is over: who, what, status, bytes
sent, seconds, request id.  Nothing of a body and no query is in it: prompts and answers are never logged.
"""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kerf_runtime.metrics import RequestMetrics
from kerf_runtime.server.responses import internal_error_response

__all__ = ["Access"]

logger = logging.getLogger(__name__)
access_log = logging.getLogger("kerf_runtime.access")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_ROUTINE = frozenset({"/health", "/ready", "/metrics"})
"""Asked every few seconds by probes and scrapers: logged at DEBUG."""
_LONGEST_PATH = 200


class Access:
    """Gives every response an ``x-request-id`` (the client's own if it has one) and logs it.

    A bug of ours becomes a 500 here, so that the traceback in the log and the response carry the id.
    """

    def __init__(self, app: ASGIApp, *, metrics: RequestMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        started = time.perf_counter()
        status, size = 0, 0

        async def named_send(message: Message) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            size += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, named_send)
        except Exception as error:
            logger.exception("request %s failed: %s", request_id, type(error).__name__)
            if status:
                raise  # half a response cannot be taken back: the server closes the connection
            await internal_error_response()(scope, receive, named_send)
        finally:
            seconds = time.perf_counter() - started
            # 499 as elsewhere: the client went away before there was an answer.
            status = status or 499
            self._metrics.answered(scope["path"], status)
            _log(scope, request_id, status, size, seconds)


def _log(scope: Scope, request_id: str, status: int, size: int, seconds: float) -> None:
    path = scope["path"]
    level = logging.DEBUG if path in _ROUTINE else logging.INFO
    if not access_log.isEnabledFor(level):
        return
    client = scope.get("client")
    access_log.log(
        level,
        "%s %s %s %s %d bytes %.3f s %s",
        client[0] if client else "-",
        scope["method"],
        _printable(path),
        status,
        size,
        seconds,
        request_id,
    )


def _printable(path: str) -> str:
    """A path that cannot forge lines of the log or flood it."""
    short = path if len(path) <= _LONGEST_PATH else path[:_LONGEST_PATH] + "..."
    return short.encode("unicode_escape").decode("ascii")
