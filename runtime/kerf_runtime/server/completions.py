"""``POST /v1/completions`` in OpenAI's wire format."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response

from kerf_runtime.server.admission import Admitted, admit_completion
from kerf_runtime.server.answering import Running, answer, collect_all, usage
from kerf_runtime.server.context import ServerContext
from kerf_runtime.server.documentation import ANSWERS_OF_COMPLETIONS
from kerf_runtime.server.generation import Answer, Piece
from kerf_runtime.server.logprobs import completion_logprobs
from kerf_runtime.server.responses import DONE, event
from kerf_runtime.server.schema import CompletionRequest
from kerf_runtime.server.streaming import merge

__all__ = ["router"]

router = APIRouter()

_Part = TypeVar("_Part", Answer, Piece)


@router.post("/v1/completions", responses=ANSWERS_OF_COMPLETIONS)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue one or several prompts."""
    return await answer(request, body, admit=admit_completion, whole=_whole, events=_events)


async def _whole(
    context: ServerContext,
    admitted: Admitted,
    body: CompletionRequest,
    running: Running,
) -> dict[str, Any]:
    answers = [_within_limit(found, body) for found in await collect_all(running)]
    wire = _Wire(context, admitted, body)
    return {
        **_head(admitted, body.model),
        "choices": [await wire.choice(i, found, first=True) for i, found in enumerate(answers)],
        "usage": usage(admitted, answers),
    }


async def _events(
    context: ServerContext,
    admitted: Admitted,
    body: CompletionRequest,
    running: Running,
) -> AsyncGenerator[bytes, None]:
    head = _head(admitted, body.model)
    if body.wants_stream_usage:
        head["usage"] = None
    wire = _Wire(context, admitted, body)
    told = [Piece("", 0)] * len(admitted.requests)
    async with aclosing(merge(running)) as pieces:
        async for index, found in pieces:
            first, piece = told[index].tokens == 0, _within_limit(found, body)
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


def _within_limit(part: _Part, body: CompletionRequest) -> _Part:
    """An answer, or a piece of one, without the token that nobody asked for if ``max_tokens`` is 0."""
    if body.max_tokens != 0:
        return part
    return replace(part, text="", tokens=0, entries=(), finish_reason="length")


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
