"""``POST /v1/chat/completions`` in OpenAI's wire format."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from kerf_runtime.server.admission import Admitted, admit_chat, slot
from kerf_runtime.server.completions import usage
from kerf_runtime.server.context import ServerContext, context_of
from kerf_runtime.server.generation import collect
from kerf_runtime.server.responses import DONE, event
from kerf_runtime.server.schema import ChatRequest
from kerf_runtime.server.streaming import EventStream, unless_disconnected

__all__ = ["router"]

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    arrived = time.perf_counter()
    context = context_of(request)
    with context.counting_refusals():
        admitted = await admit_chat(context.state, body)
        with ExitStack() as stack:
            stack.enter_context(slot(context.state, 1))
            if body.stream:
                return EventStream(
                    _events(context, admitted, body, arrived), holding=stack.pop_all()
                )
            answer = await unless_disconnected(request, collect(context.run(admitted, 0, arrived)))
    message = {"role": "assistant", "content": answer.text, "refusal": None}
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": answer.finish_reason,
    }
    return JSONResponse(
        {
            **_head(admitted, body.model, "chat.completion"),
            "choices": [choice],
            "usage": usage(admitted, answer.tokens),
        }
    )


async def _events(
    context: ServerContext, admitted: Admitted, body: ChatRequest, arrived: float
) -> AsyncGenerator[bytes, None]:
    head = _head(admitted, body.model, "chat.completion.chunk")
    if body.wants_stream_usage:
        head["usage"] = None
    tokens = 0
    first = True
    async with aclosing(context.run(admitted, 0, arrived)) as pieces:
        async for piece in pieces:
            tokens = piece.tokens
            if first:
                yield _chunk(head, {"role": "assistant", "content": ""}, None)
                first = False
            if piece.text:
                yield _chunk(head, {"content": piece.text}, None)
            if piece.finish_reason is not None:
                yield _chunk(head, {}, piece.finish_reason)
    if body.wants_stream_usage:
        yield event({**head, "choices": [], "usage": usage(admitted, tokens)})
    yield DONE


def _head(admitted: Admitted, model: str, kind: str) -> dict[str, Any]:
    return {"id": admitted.id, "object": kind, "created": int(time.time()), "model": model}


def _chunk(head: dict[str, Any], delta: dict[str, str], finish_reason: str | None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return event({**head, "choices": [choice]})
