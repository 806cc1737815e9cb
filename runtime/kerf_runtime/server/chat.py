"""``POST /v1/chat/completions`` in OpenAI's wire format."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from kerf_runtime.server.admission import Admitted, admit_chat
from kerf_runtime.server.answering import Running, answer, collect_all, usage
from kerf_runtime.server.context import ServerContext
from kerf_runtime.server.documentation import ANSWERS_OF_CHAT
from kerf_runtime.server.generation import Answer, Piece
from kerf_runtime.server.logprobs import TokenTexts, chat_logprobs
from kerf_runtime.server.responses import DONE, event
from kerf_runtime.server.schema import ChatRequest
from kerf_runtime.server.streaming import merge

__all__ = ["router"]

router = APIRouter()


@router.post("/v1/chat/completions", responses=ANSWERS_OF_CHAT)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    return await answer(request, body, admit=admit_chat, whole=_whole, events=_events)


async def _whole(
    context: ServerContext,
    admitted: Admitted,
    body: ChatRequest,
    running: Running,
) -> dict[str, Any]:
    answers = await collect_all(running)
    texts = context.token_texts if body.logprobs else None
    return {
        **_head(admitted, body.model, "chat.completion"),
        "choices": [await _choice(index, found, texts) for index, found in enumerate(answers)],
        "usage": usage(admitted, answers),
    }


async def _events(
    context: ServerContext,
    admitted: Admitted,
    body: ChatRequest,
    running: Running,
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
