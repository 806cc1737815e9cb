"""Errors in the shape of OpenAI's API, and the server-sent events of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from kerf_runtime.errors import EngineError, KerfError, OverloadedError, RequestError

__all__ = [
    "DONE",
    "BodyTooLargeError",
    "BodyTooSlowError",
    "TimedOutError",
    "UnauthorizedError",
    "UnavailableError",
    "UnknownModelError",
    "answer_response",
    "error_body",
    "error_response",
    "event",
    "handle_http_exception",
    "handle_kerf_error",
    "handle_validation_error",
    "internal_error_response",
]

DONE = b"data: [DONE]\n\n"

_PIECE_BYTES = 2**20
"""An answer with log probabilities of long prompts has hundreds of millions."""

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class UnknownModelError(RequestError):
    """The request names a model that is not served here."""

    http_status = 404


class UnauthorizedError(RequestError):
    """The API key is missing or wrong."""

    http_status = 401


class BodyTooLargeError(RequestError):
    """The request body is above the limit."""

    http_status = 413


class UnavailableError(EngineError):
    """The server is stopping or not ready; another replica can answer."""

    http_status = 503


class BodyTooSlowError(RequestError):
    """The request body did not arrive in time."""

    http_status = 408


class TimedOutError(EngineError):
    """The answer took longer than the server allows."""

    http_status = 504


_CODES: dict[type[KerfError], str] = {
    UnknownModelError: "model_not_found",
    UnauthorizedError: "invalid_api_key",
    BodyTooLargeError: "request_too_large",
    OverloadedError: "queue_full",
    BodyTooSlowError: "request_timeout",
    TimedOutError: "timeout",
}


def error_body(message: str, *, status: int, param: str | None, code: str | None) -> dict[str, Any]:
    """``{"error": {...}}`` as OpenAI's clients parse it."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def describe(error: KerfError) -> tuple[int, dict[str, Any]]:
    """Status and body of an error; a dead engine is 503: another replica can answer."""
    status = error.http_status
    if isinstance(error, EngineError) and status == 500:
        status = 503
    param = error.where if isinstance(error, RequestError) else None
    code = next((c for kind, c in _CODES.items() if isinstance(error, kind)), None)
    return status, error_body(str(error), status=status, param=param, code=code)


def error_response(error: KerfError) -> JSONResponse:
    """The whole response, with the headers that its status needs."""
    status, body = describe(error)
    headers = {}
    if status in (429, 503):
        headers["Retry-After"] = "1"
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, (UnavailableError, BodyTooLargeError, BodyTooSlowError)):
        headers["Connection"] = "close"
    return JSONResponse(body, status_code=status, headers=headers)


def internal_error_response() -> JSONResponse:
    """The response to a bug of ours, which the log has and the client need not know."""
    body = error_body(
        "an internal error; the server's log has the details",
        status=500,
        param=None,
        code="internal_error",
    )
    return JSONResponse(body, status_code=500)


async def handle_kerf_error(request: Request, error: Exception) -> JSONResponse:
    """FastAPI handler of every ``KerfError``."""
    assert isinstance(error, KerfError)  # registered for KerfError only
    return error_response(error)


async def handle_validation_error(request: Request, error: Exception) -> JSONResponse:
    """FastAPI handler of a body that does not fit the schema: 400, naming the first wrong field."""
    assert isinstance(error, RequestValidationError)  # registered for it only
    problems = error.errors()
    unread = _unread_body(problems, request.headers.get("content-type"))
    return error_response(unread or _first_problem(problems))


async def handle_http_exception(request: Request, error: Exception) -> JSONResponse:
    """FastAPI handler of unknown paths and methods."""
    assert isinstance(error, HTTPException)  # registered for it only
    status = error.status_code
    if status == 400 and error.__cause__ is not None:
        return error_response(_unreadable_body(error.__cause__))
    message = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(
        error_body(message, status=status, param=None, code=None),
        status_code=status,
        headers=dict(error.headers or {}),
    )


def answer_response(body: dict[str, Any]) -> Response:
    """A whole answer; parts of it may have been encoded before (``msgspec.Raw``).

    A large one is sent in pieces, as fast as the client reads.
    """
    content, kind = msgspec.json.encode(body), "application/json"
    if len(content) <= _PIECE_BYTES:
        return Response(content, media_type=kind)
    pieces = (content[at : at + _PIECE_BYTES] for at in range(0, len(content), _PIECE_BYTES))
    return StreamingResponse(pieces, media_type=kind, headers={"Content-Length": str(len(content))})


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _unread_body(problems: Sequence[dict[str, Any]], kind: str | None) -> RequestError | None:
    """The error of a body that is empty, or was not read as JSON because of its type."""
    first = problems[0] if problems else {}
    if tuple(first.get("loc", ())) != ("body",):
        return None
    if first.get("type") == "missing" or first.get("input") in (None, b"", {}):
        return RequestError("the request has no body", hint="Send a JSON object")
    if isinstance(first.get("input"), bytes):
        shown = "no Content-Type" if kind is None else f"Content-Type {kind[:80]!r}"
        return RequestError(
            f"the request has {shown}, so its body was not read as JSON",
            hint="Send Content-Type: application/json",
        )
    return None


def _unreadable_body(cause: BaseException) -> RequestError:
    """The error of a body that JSON's own parser gave up on."""
    reason = str(cause)
    if isinstance(cause, RecursionError):
        reason = "it is nested too deeply"
    elif isinstance(cause, UnicodeDecodeError):
        reason = f"it is not UTF-8 at byte {cause.start}"
    elif isinstance(cause, ValueError):
        reason = "a number in it has too many digits"
    return RequestError(f"the body cannot be read as JSON: {reason}", hint="Send a JSON object")


def _first_problem(problems: Sequence[dict[str, Any]]) -> RequestError:
    """One readable error from pydantic's list; unions give one problem per member, the deepest wins."""
    first: dict[str, Any] = max(
        problems, key=lambda p: len(p["loc"]), default={"loc": (), "msg": ""}
    )
    if first.get("type") == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        at = first["loc"][-1] if first["loc"] else 0
        return RequestError(
            f"the body is not valid JSON: {reason} at character {at}",
            hint="Send a JSON object with Content-Type: application/json",
        )
    path = ".".join(str(part) for part in first["loc"][1:] if _is_field(part))
    if not path and first.get("type") == "value_error":
        return RequestError(first["msg"].removeprefix("Value error, "))
    if not path and first.get("type") == "string_unicode":
        return RequestError("the name of a parameter is no valid Unicode text")
    if not path:
        return RequestError(
            "the body must be a JSON object", hint="Send it with Content-Type: application/json"
        )
    too_long = next((p for p in problems if p["type"] == "too_long"), None)
    if too_long is not None and path.split(".")[0] == "prompt":
        return RequestError(f"at most {too_long['ctx']['max_length']} prompts", where="prompt")
    if path.split(".")[0] == "prompt" and first.get("type") != "missing":
        # One problem per accepted form would be reported: none of them tells what was meant.
        return RequestError(
            "must be a text, a list of texts, a list of token ids (integers, 0 or more), or a list "
            "of such lists",
            where="prompt",
        )
    message = first["msg"].removeprefix("Value error, ")
    given = first.get("input")
    if first.get("type") == "missing":
        message = "this parameter is required"
    elif isinstance(given, (int, float, str, bool)):
        shown = repr(given) if len(repr(given)) <= 80 else repr(given)[:77] + "..."
        message = f"{message[0].lower()}{message[1:]} (got {shown})"
    return RequestError(message, where=path)


def _is_field(part: Any) -> bool:
    """Whether a part of a location is a field or an index, not the name of a union's member."""
    return isinstance(part, int) or (
        "[" not in part and part not in {"str", "int", "float", "bool"}
    )
