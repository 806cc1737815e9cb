"""Plain ASGI middleware: body limit and API key.  No buffering, streams pass untouched."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kerf_runtime.server.responses import BodyTooLargeError, UnauthorizedError, error_response

__all__ = ["Gate"]


class Gate:
    """Refuses bodies above a limit and wrong API keys.

    The limit holds for bodies without a Content-Length too: they are counted while they arrive.
    Only paths below ``/v1`` need the key: probes and scrapers have none.
    """

    def __init__(self, app: ASGIApp, *, max_body_bytes: int, api_key: str | None) -> None:
        self._app = app
        self._limit = max_body_bytes
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        too_large: BodyTooLargeError | None = None

        async def watched_send(message: Message) -> None:
            if too_large is not None:
                return  # whatever the application made of the cut body
            await send(message)

        refusal = self._refusal(scope["path"], headers)
        if refusal is not None:
            await error_response(refusal)(scope, receive, watched_send)
            return
        received = 0

        async def counted_receive() -> Message:
            nonlocal received, too_large
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limit:
                too_large = self._too_large(received)
                return {"type": "http.disconnect"}
            return message

        await self._app(scope, counted_receive, watched_send)
        if too_large is not None:
            refusal, too_large = too_large, None
            await error_response(refusal)(scope, receive, watched_send)

    def _refusal(self, path: str, headers: Headers) -> BodyTooLargeError | UnauthorizedError | None:
        if self._key is not None and path.startswith("/v1/"):
            scheme, _, token = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(token.encode(), self._key):
                return UnauthorizedError(
                    "the API key is missing or wrong",
                    hint="Send it as Authorization: Bearer KEY",
                )
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self._limit:
            return self._too_large(int(length))
        return None

    def _too_large(self, size: int) -> BodyTooLargeError:
        return BodyTooLargeError(
            f"the request body has {size} bytes or more; at most {self._limit} are allowed",
            hint="Shorten the prompt",
        )
