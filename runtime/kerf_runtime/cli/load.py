"""Load on an OpenAI-compatible server: what is asked and when, the asking, and what came of it.

Any server will do, so that others can be measured with the same program: prompts are random words (or
token ids, where their range is given), answers are streamed, and tokens are counted by the server.  The
plan is a pure function of its seed; so is the summary of the outcomes.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx
import msgspec

from kerf_runtime.errors import ConfigError

__all__ = [
    "Load",
    "Outcome",
    "Planned",
    "Target",
    "ask",
    "find_served_model",
    "plan",
    "run_load",
    "summarize",
]

# One token each, with the space before them, in most vocabularies: how many tokens a prompt really has is in
# the server's answer.
_COMMON = (
    "the of and to in is that for it was on as with be by at have are this not but had his they from she which "
    "or we an were been their has would what will there if can all her one do who so up when out about them some "
    "time could into then other only its also two more these may like first any now such make over our even most "
    "me state after many where very way life work man world still year day house case week company system program "
    "question work government number night point home water room mother area money story fact month lot right "
    "study book eye job word business issue side kind head far black long little great old big high small large "
    "next early young few public bad same able hand part place end group problem family student"
)
_WORDS = _COMMON.split()
_PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Load:
    """What is sent.

    Attributes:
        requests: how many.
        concurrency: most of them at a time.
        rate: mean of the arrivals per second (a Poisson process); None: as soon as there is room.
        input_len: tokens of a prompt, about; exact with ``vocab_size``.
        output_len: tokens of an answer.
        range_ratio: lengths are drawn from ``(1 - ratio) * length`` to ``length``.
        prefix_len: of ``input_len``, tokens that all prompts begin with.
        vocab_size: prompts are random token ids below it; None: random words.
        seed: the same seed plans the same requests.
    """

    requests: int
    concurrency: int
    input_len: int
    output_len: int
    rate: float | None = None
    range_ratio: float = 0.0
    prefix_len: int = 0
    vocab_size: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Planned:
    """One request: seconds after the start, prompt, tokens of the answer."""

    at: float
    prompt: str | list[int]
    output_len: int


@dataclass(frozen=True)
class Target:
    """Who is asked, and how.

    Attributes:
        base_url: as OpenAI's client takes it, with ``/v1``.
        chat: ask ``/chat/completions`` instead of ``/completions``.
        ignore_eos: ask for answers of the full length, an extension that most servers know.
        seconds: how long a request may take.
    """

    base_url: str
    model: str
    chat: bool = False
    api_key: str | None = None
    ignore_eos: bool = True
    temperature: float = 0.0
    seconds: float = 600.0


@dataclass
class Outcome:
    """What became of one request.  Times are ``perf_counter`` seconds.

    Attributes:
        began: when it was sent.
        texts: when each piece of text arrived.
        ended: when the answer was over.
        prompt_tokens: as the server counted them; 0 if it did not.
        output_tokens: the same; else the pieces of text.
        counted: whether the server counted.
        error: why there is no whole answer; None if there is one.
    """

    began: float
    texts: list[float] = field(default_factory=list)
    ended: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    counted: bool = False
    error: str | None = None


def plan(load: Load) -> list[Planned]:
    """The requests of ``load``, in order of arrival."""
    chance = random.Random(load.seed)

    def token() -> Any:
        return (
            chance.choice(_WORDS) if load.vocab_size is None else chance.randrange(load.vocab_size)
        )

    def length(most: int, least: int) -> int:
        return max(least, chance.randint(round((1 - load.range_ratio) * most), most))

    prefix = [token() for _ in range(load.prefix_len)]
    planned, at = [], 0.0
    for _ in range(load.requests):
        if load.rate is not None:
            at += chance.expovariate(load.rate)
        own = length(load.input_len, load.prefix_len + 1) - load.prefix_len
        tokens = [*prefix, *(token() for _ in range(own))]
        prompt = tokens if load.vocab_size is not None else " ".join(tokens)
        planned.append(Planned(at, prompt, length(load.output_len, 1)))
    return planned


async def run_load(
    target: Target,
    planned: Sequence[Planned],
    *,
    concurrency: int,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Send the requests, at most ``concurrency`` at a time and none before it is due."""
    outcomes: list[Outcome] = []
    room = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    async with (
        # ``ask`` limits the whole request; a second clock could end it with another error.
        httpx.AsyncClient(timeout=None, limits=limits) as http,
        asyncio.TaskGroup() as tasks,
    ):
        began = time.perf_counter()

        async def send(request: Planned) -> None:
            try:
                outcome = await ask(http, target, request)
            finally:
                room.release()
            outcomes.append(outcome)
            on_outcome(outcome)

        for request in planned:
            await asyncio.sleep(max(0.0, began + request.at - time.perf_counter()))
            await room.acquire()
            tasks.create_task(send(request))
    return outcomes


async def ask(http: httpx.AsyncClient, target: Target, request: Planned) -> Outcome:
    """Send one request and read its stream to the end; a failure is part of the outcome."""
    outcome = Outcome(time.perf_counter())
    path = "chat/completions" if target.chat else "completions"
    # Compressed events would arrive when a block is full, not when they are made.
    headers = {"Accept-Encoding": "identity", **_authorization(target.api_key)}
    try:
        async with (
            asyncio.timeout(target.seconds),
            http.stream(
                "POST",
                f"{target.base_url.rstrip('/')}/{path}",
                json=_body(target, request),
                headers=headers,
            ) as response,
        ):
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                outcome.error = f"HTTP {response.status_code}: {_message(text)}"
            else:
                await _read(response.aiter_raw(), outcome)
    except TimeoutError:
        outcome.error = f"no whole answer within {target.seconds:g} s"
    except httpx.HTTPError as error:
        outcome.error = f"{type(error).__name__}: {error}".rstrip(": ")
    outcome.ended = time.perf_counter()
    if not outcome.counted:
        outcome.output_tokens = len(outcome.texts)
    return outcome


def find_served_model(target_url: str, api_key: str | None) -> str:
    """The first model that the server lists.

    Raises:
        ConfigError: nobody answers there, or there is no model.
    """
    try:
        response = httpx.get(
            f"{target_url.rstrip('/')}/models", headers=_authorization(api_key), timeout=30
        )
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"the server's models cannot be read: {type(error).__name__}: {error}",
            where=f"--base-url {target_url}",
            hint="The URL ends in /v1 for most servers; --model names a model without asking",
        ) from None


def summarize(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Rates over the time from the first request to the last answer, and latencies in seconds.

    ``tpotSeconds`` is per request the time from its first text to its last divided by the tokens after
    the first; ``itlSeconds`` are the gaps between pieces of text, whatever the number of tokens in each.
    """
    whole = [outcome for outcome in outcomes if outcome.error is None]
    seconds = max((o.ended for o in outcomes), default=0.0) - min(
        (o.began for o in outcomes), default=0.0
    )
    answered = [outcome for outcome in whole if outcome.texts]
    prompt, output = (
        sum(getattr(o, f"{kind}_tokens") for o in whole) for kind in ("prompt", "output")
    )
    per_second = 1 / seconds if seconds else 0.0
    return {
        "seconds": seconds,
        "completed": len(whole),
        "failed": len(outcomes) - len(whole),
        "errors": dict(Counter(o.error for o in outcomes if o.error is not None).most_common(20)),
        "promptTokens": prompt,
        "outputTokens": output,
        "tokensCountedBy": "server" if all(o.counted for o in whole) else "pieces of text",
        "requestsPerSecond": len(whole) * per_second,
        "outputTokensPerSecond": output * per_second,
        "totalTokensPerSecond": (prompt + output) * per_second,
        "ttftSeconds": _distribution([o.texts[0] - o.began for o in answered]),
        "tpotSeconds": _distribution(
            [
                (o.texts[-1] - o.texts[0]) / (o.output_tokens - 1)
                for o in answered
                if o.output_tokens > 1
            ]
        ),
        "itlSeconds": _distribution([b - a for o in answered for a, b in pairwise(o.texts)]),
        "latencySeconds": _distribution([o.ended - o.began for o in whole]),
    }


def _distribution(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles (nearest rank) and maximum; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    ranks = {f"p{p}": ordered[max(0, -(-len(ordered) * p // 100) - 1)] for p in _PERCENTILES}
    return {"mean": statistics.fmean(ordered), **ranks, "max": ordered[-1]}


def _authorization(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


def _body(target: Target, request: Planned) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": target.model,
        "max_tokens": request.output_len,
        "temperature": target.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.ignore_eos:
        body["ignore_eos"] = True
    if target.chat:
        body["messages"] = [{"role": "user", "content": request.prompt}]
    else:
        body["prompt"] = request.prompt
    return body


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_events = msgspec.json.Decoder(_Event)


async def _read(stream: AsyncIterator[bytes], outcome: Outcome) -> None:
    """Note the pieces of an event stream while they arrive."""
    rest = b""
    done = False
    async for data in stream:
        now = time.perf_counter()
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            content = line[5:].strip()
            if content == b"[DONE]":
                done = True
                continue
            try:
                event = _events.decode(content)
            except msgspec.DecodeError as error:
                outcome.error = f"an event cannot be read: {error}"
                return
            if event.error is not None:
                outcome.error = f"in the stream: {_message(content.decode(errors='replace'))}"
                return
            _note(event, now, outcome)
    if not done:
        outcome.error = "the stream ended early"


def _note(event: _Event, now: float, outcome: Outcome) -> None:
    if event.usage is not None and event.usage.completion_tokens:
        outcome.counted = True
        outcome.prompt_tokens = event.usage.prompt_tokens
        outcome.output_tokens = event.usage.completion_tokens
    for choice in event.choices or ():
        delta = choice.delta or _Delta()
        if choice.text or delta.content or delta.reasoning_content:
            outcome.texts.append(now)


def _message(text: str) -> str:
    """The message of an error in OpenAI's shape; else the beginning of the text."""
    try:
        return str(msgspec.json.decode(text)["error"]["message"])[:200]
    except (msgspec.DecodeError, LookupError, TypeError):
        return text.strip()[:200]
