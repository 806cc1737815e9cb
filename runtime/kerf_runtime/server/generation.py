"""Running one prompt: engine tokens in, certain text out, latencies observed on the way."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from kerf_runtime.engine.messages import AddRequest, TokenLogprobs, TokenOutput
from kerf_runtime.errors import EngineError, KerfError, RequestError
from kerf_runtime.metrics import RequestMetrics
from kerf_runtime.server.detokenize import IncrementalDecoder, StopMatcher
from kerf_runtime.server.logprobs import TokenEntry
from kerf_runtime.server.responses import TimedOutError
from kerf_runtime.server.state import ChatTokenizer, Client
from kerf_runtime.server.turns import in_turns

__all__ = ["Answer", "Piece", "collect", "generate", "time_limit"]


@dataclass(frozen=True)
class Piece:
    """Some text of an answer.  ``tokens`` is the number generated so far; the last has a reason.

    ``entries`` are the tokens whose text it starts or continues, if log probabilities were asked for.
    ``prompt`` are those of the prompt, in the first piece, if they were asked for too.  ``cached_tokens`` of
    the prompt were in the KV cache.
    """

    text: str
    tokens: int
    finish_reason: str | None = None
    entries: tuple[TokenEntry, ...] = ()
    prompt: tuple[TokenEntry, ...] = ()
    cached_tokens: int = 0


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    text: str
    tokens: int
    finish_reason: str
    entries: tuple[TokenEntry, ...] = ()
    prompt: tuple[TokenEntry, ...] = ()
    cached_tokens: int = 0


async def generate(
    client: Client,
    tokenizer: ChatTokenizer,
    metrics: RequestMetrics,
    request: AddRequest,
    stops: tuple[str, ...],
    arrived: float,
    *,
    ended: Callable[[str], None],
    continues: bool = False,
    seconds: float | None = None,
) -> AsyncGenerator[Piece, None]:
    """Pieces of one answer; the last one, and only it, has a finish reason.

    Closing the iterator early aborts the request in the engine.  ``arrived`` is a ``perf_counter``
    value from when the HTTP request came; ``seconds`` later it is given up.  ``ended`` is told how it
    ended, unless nobody ever asked for a piece.  ``continues``: the text of the prompt goes on in the answer.

    Raises:
        RequestError: the engine cannot run the request as asked.
        EngineError: the engine died or gave the request up, or the time is over.
    """
    text = _Text(tokenizer, request, stops, continues=continues)
    clock = _Clock(metrics, arrived)
    reason = "abort"
    try:
        # Closing explicitly: the abort must not wait for the garbage collector.
        outputs = client.generate(request)
        timed = outputs if seconds is None else _within(outputs, arrived, seconds)
        async with aclosing(outputs), aclosing(timed):
            async for output in timed:
                clock.tokens(len(output.token_ids))
                piece = await text.push(output)
                if piece.finish_reason in ("stop", "length"):
                    reason = piece.finish_reason
                    yield piece
                    return
                if piece.finish_reason is not None:
                    reason = "error"
                    raise EngineError(f"the engine gave the request up ({piece.finish_reason})")
                if piece.text or piece.prompt:
                    yield piece
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
        ended(reason)
        clock.finished(reason)


async def collect(pieces: AsyncIterator[Piece]) -> Answer:
    """The whole answer of ``generate``."""
    texts: list[str] = []
    entries: list[TokenEntry] = []
    prompt: list[TokenEntry] = []
    tokens, cached, reason = 0, 0, "stop"
    async for piece in pieces:
        texts.append(piece.text)
        entries.extend(piece.entries)
        prompt.extend(piece.prompt)
        tokens, cached = piece.tokens, piece.cached_tokens
        reason = piece.finish_reason or reason
    return Answer("".join(texts), tokens, reason, tuple(entries), tuple(prompt), cached)


@asynccontextmanager
async def time_limit(arrived: float, seconds: float | None) -> AsyncIterator[None]:
    """Give up what is inside ``seconds`` after the request ``arrived`` (a ``perf_counter`` value).

    Raises:
        TimedOutError: the time is over.
    """
    if seconds is None:
        yield
        return
    left = arrived + seconds - time.perf_counter()
    try:
        if left <= 0.0:
            raise TimeoutError  # without waiting for what is inside to wait
        async with asyncio.timeout(left):
            yield
    except TimeoutError:
        raise TimedOutError(
            f"the answer was not finished within {seconds:g} seconds",
            hint="Ask for fewer tokens, or retry when there is less load",
        ) from None


async def _within(
    outputs: AsyncGenerator[TokenOutput, None], arrived: float, seconds: float
) -> AsyncGenerator[TokenOutput, None]:
    """The outputs, until ``seconds`` after the arrival."""
    while True:
        async with time_limit(arrived, seconds):
            try:
                output = await anext(outputs)
            except StopAsyncIteration:
                return
        yield output


class _Text:
    """Text of one answer as it becomes certain, and the tokens it is made of.

    A token's entry is told with the first piece that reaches beyond the token's start.  Tokens behind
    a stop string, and an end token without text, are not part of the answer and have none.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        request: AddRequest,
        stops: tuple[str, ...],
        *,
        continues: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._request = request
        before = request.prompt_token_ids if continues else ()
        self._decoder = IncrementalDecoder(tokenizer.decode, before)
        self._matcher = StopMatcher(stops)
        self._decoded = 0
        self._shown = 0
        self._held: deque[TokenEntry] = deque()
        self._cached_tokens = 0
        self.tokens = 0

    async def push(self, output: TokenOutput) -> Piece:
        """What these tokens add; with the engine's reason, or ``stop`` if a stop string was found."""
        text = ""
        reason = output.finish_reason
        self._cached_tokens += output.cached_tokens
        for index, token in enumerate(output.token_ids):
            self.tokens += 1
            if output.logprobs is not None:
                found = output.logprobs[index]
                self._held.append(TokenEntry(token, self._decoded, found.logprob, found.top))
            if not self._matcher.stopped:
                text += self._match(self._decoder.push([token]))
        if reason is not None and not self._matcher.stopped:
            text += self._match(self._decoder.flush())
        if self._matcher.stopped:
            reason = "stop"
        elif reason is not None:
            text += self._matcher.flush()
        self._shown += len(text)
        entries = self._take(reason)
        prompt: list[TokenEntry] = []
        if output.prompt_logprobs is not None:
            prompt = await in_turns(self._of_prompt(output.prompt_logprobs))
        return Piece(text, self.tokens, reason, entries, tuple(prompt), self._cached_tokens)

    def _of_prompt(self, found: list[TokenLogprobs | None]) -> Iterator[TokenEntry]:
        """The entries of the prompt, whose text is in front of the answer's."""
        decoder, offset = IncrementalDecoder(self._tokenizer.decode), 0
        for token, entry in zip(self._request.prompt_token_ids, found, strict=True):
            logprob, top = (None, []) if entry is None else (entry.logprob, entry.top)
            yield TokenEntry(token, offset, logprob, top)
            offset += len(decoder.push([token]))

    def _match(self, text: str) -> str:
        self._decoded += len(text)
        # Stop strings, too, may not end an answer that is too short; they may begin in it.
        long_enough = self.tokens >= self._request.params.min_tokens
        return self._matcher.push(text, may_stop=long_enough)

    def _take(self, reason: str | None) -> tuple[TokenEntry, ...]:
        """The entries to tell now."""
        over = reason is not None and not self._matcher.stopped
        if over and reason == "stop" and self._held:
            last = self._held[-1]
            if not self._tokenizer.decode([last.token_id]):
                self._held.pop()
        told = []
        while self._held and (over or self._held[0].offset < self._shown):
            told.append(self._held.popleft())
        return tuple(told)


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
