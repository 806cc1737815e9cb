"""``POST /v1/completions`` in OpenAI's wire format."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from kerf_runtime.server.admission import Admitted, admit_completion, slot
from kerf_runtime.server.context import ServerContext, context_of
from kerf_runtime.server.generation import Answer, Piece, collect
from kerf_runtime.server.responses import DONE, event
from kerf_runtime.server.schema import CompletionRequest
from kerf_runtime.server.streaming import EventStream, merge, unless_disconnected

__all__ = ["router", "usage"]

router = APIRouter()


@router.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue one or several prompts."""
    arrived = time.perf_counter()
    context = context_of(request)
    with context.counting_refusals():
        admitted = await admit_completion(context.state, body)
        with ExitStack() as stack:
            stack.enter_context(slot(context.state, len(admitted.requests)))
            if body.stream:
                return EventStream(
                    _events(context, admitted, body, arrived), holding=stack.pop_all()
                )
            answers = await unless_disconnected(
                request,
                _collect_all(
                    [
                        context.run(admitted, index, arrived)
                        for index in range(len(admitted.requests))
                    ]
                ),
            )
    return JSONResponse(
        {
            **_head(admitted, body.model),
            "choices": [
                _choice(index, answer.text, answer.finish_reason)
                for index, answer in enumerate(answers)
            ],
            "usage": usage(admitted, sum(answer.tokens for answer in answers)),
        }
    )


def usage(admitted: Admitted, completion_tokens: int) -> dict[str, int]:
    """Token counts of a request: every generated token counts, the one that ended it too."""
    prompt_tokens = admitted.prompt_tokens
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


async def _collect_all(answers: list[AsyncGenerator[Piece, None]]) -> list[Answer]:
    """All answers at once; if one fails the others are cancelled, which aborts them."""
    tasks = [asyncio.create_task(collect(answer)) for answer in answers]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _events(
    context: ServerContext, admitted: Admitted, body: CompletionRequest, arrived: float
) -> AsyncGenerator[bytes, None]:
    head = _head(admitted, body.model)
    if body.wants_stream_usage:
        head["usage"] = None
    counts = [0] * len(admitted.requests)
    runs = [context.run(admitted, index, arrived) for index in range(len(counts))]
    async for index, piece in merge(runs):
        counts[index] = piece.tokens
        yield event({**head, "choices": [_choice(index, piece.text, piece.finish_reason)]})
    if body.wants_stream_usage:
        yield event({**head, "choices": [], "usage": usage(admitted, sum(counts))})
    yield DONE


def _head(admitted: Admitted, model: str) -> dict[str, Any]:
    return {
        "id": admitted.id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
    }


def _choice(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
