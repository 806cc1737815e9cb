"""What both APIs do with a request: admit it, answer it as a whole or as a stream, and count its tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response

from kerf_runtime.server.admission import Admitted
from kerf_runtime.server.context import ServerContext, context_of
from kerf_runtime.server.generation import Answer, Piece, collect, time_limit
from kerf_runtime.server.responses import answer_response
from kerf_runtime.server.schema import SamplingFields
from kerf_runtime.server.state import ServerState
from kerf_runtime.server.streaming import EventStream, unless_disconnected

__all__ = ["Running", "answer", "collect_all", "usage"]

Body = TypeVar("Body", bound=SamplingFields)
Running = list[AsyncGenerator[Piece, None]]
"""Pieces of every answer of a request."""


async def answer(
    request: Request,
    body: Body,
    *,
    admit: Callable[[ServerState, Body, ExitStack], Awaitable[Admitted]],
    whole: Callable[[ServerContext, Admitted, Body, Running], Awaitable[dict[str, Any]]],
    events: Callable[[ServerContext, Admitted, Body, Running], AsyncGenerator[bytes, None]],
) -> Response:
    """The response to a request, which holds its places in the queue until it is over.

    Args:
        request: as it came.
        body: of it, read.
        admit: checks and tokenises it.
        whole: the body of an answer in one piece.
        events: the answer as server-sent events.

    Raises:
        KerfError: it cannot be served; the status is in the class.
    """
    arrived = time.perf_counter()
    context = context_of(request)
    with context.counting_refusals(), ExitStack() as stack:
        async with time_limit(arrived, context.state.settings.request_seconds):
            admitted = await admit(context.state, body, stack)
        running = stack.enter_context(context.answering(admitted, arrived))
        if body.stream:
            return EventStream(events(context, admitted, body, running), holding=stack.pop_all())
        found = await unless_disconnected(request, whole(context, admitted, body, running))
    return answer_response(found)


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


async def collect_all(answers: Running) -> list[Answer]:
    """All answers at once; if one fails the others are cancelled, which aborts them."""
    tasks = [asyncio.create_task(collect(answer)) for answer in answers]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
