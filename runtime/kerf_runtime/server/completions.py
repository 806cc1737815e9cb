"""``POST /v1/completions`` in OpenAI's wire format."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from kerf_runtime.server.admission import Admitted, admit_completion
from kerf_runtime.server.context import ServerContext, context_of
from kerf_runtime.server.documentation import ANSWERS_OF_COMPLETIONS
from kerf_runtime.server.generation import Answer, Piece, collect, time_limit
from kerf_runtime.server.logprobs import completion_logprobs
from kerf_runtime.server.responses import DONE, answer_response, event
from kerf_runtime.server.schema import CompletionRequest
from kerf_runtime.server.streaming import EventStream, merge, unless_disconnected

__all__ = ["collect_all", "router", "usage"]

router = APIRouter()


@router.post("/v1/completions", responses=ANSWERS_OF_COMPLETIONS)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue one or several prompts."""
    arrived = time.perf_counter()
    context = context_of(request)
    with context.counting_refusals(), ExitStack() as stack:
        async with time_limit(arrived, context.state.settings.request_seconds):
            admitted = await admit_completion(context.state, body, stack)
        running = stack.enter_context(context.answering(admitted, arrived))
        if body.stream:
            return EventStream(_events(context, admitted, body, running), holding=stack.pop_all())
        whole = await unless_disconnected(request, _whole(context, admitted, body, running))
    return answer_response({**_head(admitted, body.model), **whole})


def usage(admitted: Admitted, answers: Sequence[Answer | Piece]) -> dict[str, Any]:
    """Token counts of a request: every generated token counts, the one that ended it too.

    Cached are those tokens of a prompt that none of its answers had to compute.

    Args:
        admitted: the request.
        answers: all of them, or the last piece of each.
    """
    prompt_tokens = admitted.prompt_tokens
    completion_tokens = sum(answer.tokens for answer in answers)
    cached = [answer.cached_tokens for answer in answers]
    groups = range(0, len(cached), admitted.choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(min(cached[at : at + admitted.choices]) for at in groups)
        },
    }


async def collect_all(answers: list[AsyncGenerator[Piece, None]]) -> list[Answer]:
    """All answers at once; if one fails the others are cancelled, which aborts them."""
    tasks = [asyncio.create_task(collect(answer)) for answer in answers]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _whole(
    context: ServerContext,
    admitted: Admitted,
    body: CompletionRequest,
    running: list[AsyncGenerator[Piece, None]],
) -> dict[str, Any]:
    answers = await collect_all(running)
    wire = _Wire(context, admitted, body)
    return {
        "choices": [await wire.choice(i, answer, first=True) for i, answer in enumerate(answers)],
        "usage": usage(admitted, answers),
    }


async def _events(
    context: ServerContext,
    admitted: Admitted,
    body: CompletionRequest,
    running: list[AsyncGenerator[Piece, None]],
) -> AsyncGenerator[bytes, None]:
    head = _head(admitted, body.model)
    if body.wants_stream_usage:
        head["usage"] = None
    wire = _Wire(context, admitted, body)
    told = [Piece("", 0)] * len(admitted.requests)
    async with aclosing(merge(running)) as pieces:
        async for index, piece in pieces:
            first = told[index].tokens == 0
            told[index] = piece
            yield event({**head, "choices": [await wire.choice(index, piece, first=first)]})
    if body.wants_stream_usage:
        yield event({**head, "choices": [], "usage": usage(admitted, told)})
    yield DONE


def _head(admitted: Admitted, model: str) -> dict[str, Any]:
    return {
        "id": admitted.id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
    }


class _Wire:
    """Answers and pieces of them as choices."""

    def __init__(self, context: ServerContext, admitted: Admitted, body: CompletionRequest) -> None:
        self._texts = None if body.logprobs is None else context.token_texts
        self._echoes = admitted.echoes

    async def choice(self, index: int, part: Answer | Piece, *, first: bool) -> dict[str, Any]:
        """The choice at ``index``; ``first`` says that nothing of it was told before."""
        echo = self._echoes[index]
        logprobs = None
        if self._texts is not None and (part.prompt or part.entries or isinstance(part, Answer)):
            logprobs = await completion_logprobs(
                part.prompt, part.entries, self._texts, before=len(echo)
            )
        return {
            "index": index,
            "text": echo + part.text if first else part.text,
            "logprobs": logprobs,
            "finish_reason": part.finish_reason,
        }
