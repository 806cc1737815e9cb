"""``POST /v1/chat/completions`` in OpenAI's wire format."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from kerf_runtime.server.admission import Admitted, admit_chat
from kerf_runtime.server.completions import collect_all, usage
from kerf_runtime.server.context import ServerContext, context_of
from kerf_runtime.server.documentation import ANSWERS_OF_CHAT
from kerf_runtime.server.generation import Answer, Piece, time_limit
from kerf_runtime.server.logprobs import TokenTexts, chat_logprobs
from kerf_runtime.server.responses import DONE, answer_response, event
from kerf_runtime.server.schema import ChatRequest
from kerf_runtime.server.streaming import EventStream, merge, unless_disconnected

__all__ = ["router"]

router = APIRouter()


@router.post("/v1/chat/completions", responses=ANSWERS_OF_CHAT)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    arrived = time.perf_counter()
    context = context_of(request)
    with context.counting_refusals(), ExitStack() as stack:
        async with time_limit(arrived, context.state.settings.request_seconds):
            admitted = await admit_chat(context.state, body, stack)
        running = stack.enter_context(context.answering(admitted, arrived))
        if body.stream:
            return EventStream(_events(context, admitted, body, running), holding=stack.pop_all())
        whole = await unless_disconnected(request, _whole(context, admitted, body, running))
    return answer_response({**_head(admitted, body.model, "chat.completion"), **whole})


async def _whole(
    context: ServerContext,
    admitted: Admitted,
    body: ChatRequest,
    running: list[AsyncGenerator[Piece, None]],
) -> dict[str, Any]:
    answers = await collect_all(running)
    texts = context.token_texts if body.logprobs else None
    return {
        "choices": [await _choice(index, answer, texts) for index, answer in enumerate(answers)],
        "usage": usage(admitted, answers),
    }


async def _events(
    context: ServerContext,
    admitted: Admitted,
    body: ChatRequest,
    running: list[AsyncGenerator[Piece, None]],
) -> AsyncGenerator[bytes, None]:
    head = _head(admitted, body.model, "chat.completion.chunk")
    if body.wants_stream_usage:
        head["usage"] = None
    texts = context.token_texts if body.logprobs else None
    told = [Piece("", 0)] * len(admitted.requests)
    async with aclosing(merge(running)) as pieces:
        async for index, piece in pieces:
            if told[index].tokens == 0:
                yield _chunk(head, index, {"role": "assistant", "content": ""})
            told[index] = piece
            if piece.text or piece.entries:
                logprobs = None
                if texts is not None and piece.entries:
                    logprobs = await chat_logprobs(piece.entries, texts)
                yield _chunk(head, index, {"content": piece.text}, logprobs=logprobs)
            if piece.finish_reason is not None:
                yield _chunk(head, index, {}, finish_reason=piece.finish_reason)
    if body.wants_stream_usage:
        yield event({**head, "choices": [], "usage": usage(admitted, told)})
    yield DONE


def _head(admitted: Admitted, model: str, kind: str) -> dict[str, Any]:
    return {"id": admitted.id, "object": kind, "created": int(time.time()), "model": model}


async def _choice(index: int, answer: Answer, texts: TokenTexts | None) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": answer.text, "refusal": None},
        "logprobs": None if texts is None else await chat_logprobs(answer.entries, texts),
        "finish_reason": answer.finish_reason,
    }


def _chunk(
    head: dict[str, Any],
    index: int,
    delta: dict[str, str],
    *,
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> bytes:
    choice = {
        "index": index,
        "delta": delta,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
    }
    return event({**head, "choices": [choice]})
