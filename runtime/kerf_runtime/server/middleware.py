"""Plain ASGI middleware: limits of bodies, API key.  No buffering, streams pass untouched."""

from __future__ import annotations

import asyncio
import hmac
import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kerf_runtime.errors import RequestError
from kerf_runtime.server.responses import (
    BodyTooLargeError,
    BodyTooSlowError,
    UnauthorizedError,
    error_response,
)

__all__ = ["Gate"]


class Gate:
    """Refuses bodies that are too large or too slow, and wrong API keys.

    The limit holds for bodies without a Content-Length too: they are counted while they arrive.
    Only paths below ``/v1`` need the key: probes and scrapers have none.
    """

    def __init__(
        self, app: ASGIApp, *, max_body_bytes: int, body_seconds: float, api_key: str | None
    ) -> None:
        self._app = app
        self._limit = max_body_bytes
        self._seconds = body_seconds
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = self._refusal(scope["path"], headers)
        if refusal is not None:
            await error_response(refusal)(scope, receive, send)
            return
        deadline = time.monotonic() + self._seconds
        received, complete = 0, False

        async def watched_send(message: Message) -> None:
            if refusal is None:  # else: whatever the application made of the cut body
                await send(message)

        async def counted_receive() -> Message:
            nonlocal received, complete, refusal
            if complete:
                return await receive()
            try:
                left = max(deadline - time.monotonic(), 0.0)
                message = await asyncio.wait_for(receive(), left)
            except TimeoutError:
                refusal = self._too_slow()
                return {"type": "http.disconnect"}
            received += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if received > self._limit:
                refusal = self._too_large(received)
                return {"type": "http.disconnect"}
            return message

        await self._app(scope, counted_receive, watched_send)
        if refusal is not None:
            await error_response(refusal)(scope, receive, send)

    def _refusal(self, path: str, headers: Headers) -> RequestError | None:
        if self._key is not None and path.startswith("/v1/"):
            scheme, _, token = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(token.encode(), self._key):
                return UnauthorizedError(
                    "the API key is missing or wrong",
                    hint="Send it as Authorization: Bearer KEY",
                )
        length = headers.get("content-length", "")
        if length.isascii() and length.isdigit():
            size = int(length[:20])  # int() refuses thousands of digits
            if size > self._limit:
                return self._too_large(size)
        return None

    def _too_large(self, size: int) -> BodyTooLargeError:
        return BodyTooLargeError(
            f"the request body has {size} bytes or more; at most {self._limit} are allowed",
            hint="Shorten the prompt",
        )

    def _too_slow(self) -> BodyTooSlowError:
        return BodyTooSlowError(
            f"the request body did not arrive within {self._seconds:g} seconds",
            hint="Send it at once",
        )
