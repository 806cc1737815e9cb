"""Running one prompt: engine tokens in, certain text out, latencies observed on the way."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

from kerf_runtime.engine.messages import AddRequest
from kerf_runtime.errors import EngineError, KerfError, RequestError
from kerf_runtime.metrics import RequestMetrics
from kerf_runtime.server.detokenize import IncrementalDecoder, StopMatcher
from kerf_runtime.server.state import ChatTokenizer, Client

__all__ = ["Answer", "Piece", "collect", "generate"]


@dataclass(frozen=True)
class Piece:
    """Some text of an answer.  ``tokens`` is the number generated so far; the last has a reason."""

    text: str
    tokens: int
    finish_reason: str | None = None


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    text: str
    tokens: int
    finish_reason: str


async def generate(
    client: Client,
    tokenizer: ChatTokenizer,
    metrics: RequestMetrics,
    request: AddRequest,
    stops: tuple[str, ...],
    arrived: float,
) -> AsyncGenerator[Piece, None]:
    """Pieces of one answer; the last one, and only it, has a finish reason.

    Closing the iterator early aborts the request in the engine.  ``arrived`` is a ``perf_counter``
    value from when the HTTP request came.

    Raises:
        RequestError: the engine cannot run the request as asked.
        EngineError: the engine died or gave the request up.
    """
    decoder, matcher = IncrementalDecoder(tokenizer.decode), StopMatcher(stops)
    clock = _Clock(metrics, arrived)
    tokens, reason = 0, "abort"
    try:
        # Closing explicitly: the abort must not wait for the garbage collector.
        async with aclosing(client.generate(request)) as outputs:
            async for output in outputs:
                clock.tokens(len(output.token_ids))
                tokens += len(output.token_ids)
                text = matcher.push(decoder.push(output.token_ids))
                if output.finish_reason is not None and not matcher.stopped:
                    text += matcher.push(decoder.flush())
                if matcher.stopped:
                    reason = "stop"
                elif output.finish_reason is not None:
                    reason = output.finish_reason
                    text += matcher.flush()
                if reason in ("stop", "length"):
                    yield Piece(text, tokens, reason)
                    return
                if output.finish_reason is not None:
                    reason = "error"
                    raise EngineError(f"the engine gave the request up ({output.finish_reason})")
                if text:
                    yield Piece(text, tokens)
        reason = "error"
        raise EngineError("the engine ended the request without a reason")
    except RequestError:
        reason = "refused"
        raise
    except KerfError as error:
        reason = "error"
        if isinstance(error, EngineError):
            raise
        # Whatever kind of failure ended the engine: to the client the server is unavailable.
        raise EngineError(f"the engine has failed: {error}") from error
    finally:
        metrics.finished(reason)
        clock.finished(reason)


async def collect(pieces: AsyncIterator[Piece]) -> Answer:
    """The whole answer of ``generate``."""
    texts, tokens, reason = [], 0, "stop"
    async for piece in pieces:
        texts.append(piece.text)
        tokens, reason = piece.tokens, piece.finish_reason or reason
    return Answer("".join(texts), tokens, reason)


class _Clock:
    """Observes time to first token, time between tokens and the whole duration."""

    def __init__(self, metrics: RequestMetrics, arrived: float) -> None:
        self._metrics = metrics
        self._arrived = arrived
        self._last: float | None = None

    def tokens(self, count: int) -> None:
        if count == 0:
            return
        now = time.perf_counter()
        if self._last is None:
            self._metrics.time_to_first_token.observe(now - self._arrived)
            count -= 1
            self._last = now
        for _ in range(count):
            self._metrics.inter_token_latency.observe((now - self._last) / count)
        self._last = now

    def finished(self, reason: str) -> None:
        if reason in ("stop", "length"):
            self._metrics.duration.observe(time.perf_counter() - self._arrived)
