"""From a valid body to engine requests: may it run here and now, and what exactly runs.

Everything that can refuse a request does so here, before anything of it reaches the engine.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from kerf_runtime.engine.messages import AddRequest, Started
from kerf_runtime.errors import EngineError, KerfError, OverloadedError, RequestError
from kerf_runtime.server.responses import UnavailableError, UnknownModelError
from kerf_runtime.server.schema import (
    ChatRequest,
    CompletionRequest,
    SamplingFields,
    check_text,
)
from kerf_runtime.server.state import ChatTokenizer, ServerState
from kerf_runtime.server.turns import in_turns
from kerf_runtime.server.unsupported import check_extra_fields

__all__ = ["Admitted", "admit_chat", "admit_completion"]

_INLINE_CHARACTERS = 4096
"""Longer texts are tokenised in a thread, so that other requests' tokens keep flowing."""
_SAMPLE_CHARACTERS = 1 << 20
"""Of longer texts the beginning is tokenised first: eight million tokens take seconds and a gigabyte."""
_DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens for completions; chat has none."""


@dataclass(frozen=True)
class Admitted:
    """A request that may run: one engine request per answer, those of the first prompt first.

    Attributes:
        id: of the whole request.
        requests: of the engine.
        stops: strings that end each answer.
        choices: answers to each prompt.
        prompt_tokens: tokens of all prompts; several answers to one prompt count it once.
        echoes: what each answer begins with.
        continues: whether an answer goes on with the text of its prompt, and is not a text of its own.
    """

    id: str
    requests: tuple[AddRequest, ...]
    stops: tuple[str, ...]
    choices: int
    prompt_tokens: int
    echoes: tuple[str, ...]
    continues: bool


async def admit_completion(
    state: ServerState, body: CompletionRequest, holding: ExitStack
) -> Admitted:
    """Check a completions request and tokenise its prompts.

    Args:
        state: of the server.
        body: the request.
        holding: keeps its places in the queue until it is left.

    Raises:
        KerfError: it cannot be served; the status is in the class.
    """
    tokenizer, started = _check_servable(state, body)
    if body.max_tokens == 0 and not body.echo:
        raise RequestError(
            "max_tokens should be greater than or equal to 1 (got 0)",
            where="max_tokens",
            hint="0 tells the prompt and its log probabilities, with echo",
        )
    prompts = body.prompts()
    holding.enter_context(_places(state, _check_answers(state, body, len(prompts))))
    token_lists = []
    for prompt in prompts:
        if isinstance(prompt, str):
            token_lists.append(await _encode(state, prompt, special=True, where="prompt"))
        else:
            token_lists.append(_check_tokens(prompt, started.vocab_size, where="prompt"))
    limit = _DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    explicit = body.max_tokens is not None
    admitted = _admitted("cmpl", body, started, token_lists, limit=limit, explicit=explicit)
    if not body.echo:
        return admitted
    pairs = zip(prompts, token_lists, strict=True)
    texts = await in_turns(p if isinstance(p, str) else tokenizer.decode(t) for p, t in pairs)
    echoes = tuple(text for text in texts for _ in range(admitted.choices))
    return replace(admitted, echoes=echoes)


async def admit_chat(state: ServerState, body: ChatRequest, holding: ExitStack) -> Admitted:
    """Check a chat request, apply the checkpoint's template and tokenise.

    Args:
        state: of the server.
        body: the request.
        holding: keeps its places in the queue until it is left.

    Raises:
        KerfError: it cannot be served; the status is in the class.
    """
    tokenizer, started = _check_servable(state, body)
    holding.enter_context(_places(state, _check_answers(state, body, 1)))
    if len(body.messages) > started.max_model_len:
        raise RequestError(
            f"{len(body.messages)} messages; the model's limit is {started.max_model_len} tokens",
            where="messages",
            hint="Leave old messages out",
        )
    messages = [message.to_template() for message in body.messages]
    if sum(len(message["content"]) for message in messages) <= _INLINE_CHARACTERS:
        text = tokenizer.apply_chat_template(messages)
    else:
        text = await asyncio.to_thread(tokenizer.apply_chat_template, messages)
    tokens = await _encode(state, text, special=False, where="messages")
    limit = body.limit
    return _admitted(
        "chatcmpl",
        body,
        started,
        [tokens],
        limit=started.max_model_len if limit is None else limit,
        explicit=limit is not None,
    )


@contextmanager
def _places(state: ServerState, count: int) -> Iterator[None]:
    """Hold places in the queue for ``count`` answers, from before they are tokenised: draining waits for them.

    Raises:
        OverloadedError: more requests wait than maxQueueLen allows.
    """
    settings = state.settings
    waiting = state.outstanding + count - settings.max_num_seqs
    if waiting > settings.max_queue_len and state.outstanding > 0:
        raise OverloadedError(
            f"the queue is full: {state.outstanding} requests are running or waiting, and "
            f"maxQueueLen is {settings.max_queue_len}",
            hint="Retry later, or add replicas",
        )
    state.outstanding += count
    try:
        yield
    finally:
        state.outstanding -= count


def _check_servable(state: ServerState, body: SamplingFields) -> tuple[ChatTokenizer, Started]:
    error = state.error()
    if error is not None:
        raise EngineError(f"the engine has failed: {error}", hint="Another replica may answer")
    started = state.client.started
    if started is None or state.tokenizer is None:
        phase = state.readiness().status
        raise UnavailableError(
            f"the server is still starting (phase {phase})", hint="Wait for /ready"
        )
    if state.refuses_new_requests():
        raise UnavailableError("the server is shutting down", hint="Another replica may answer")
    check_extra_fields(body)
    if body.model != state.settings.served_name:
        raise UnknownModelError(
            f"the model {body.model!r} does not exist here",
            where="model",
            hint=f"This server serves {state.settings.served_name!r}",
        )
    return state.tokenizer, started


async def _encode(state: ServerState, text: str, *, special: bool, where: str) -> list[int]:
    tokenizer, started = state.tokenizer, state.client.started
    assert tokenizer is not None  # admission refuses requests before both are there
    assert started is not None
    check_text(text, where=where)
    if len(text) <= _INLINE_CHARACTERS:
        return tokenizer.encode(text, special)

    def encode_long() -> list[int]:
        if len(text) > _SAMPLE_CHARACTERS:
            sample = tokenizer.encode(text[:_SAMPLE_CHARACTERS], special)
            # Half as many more: the last word is cut, and may come out as more tokens than the whole.
            if len(sample) > 1.5 * started.max_model_len:
                raise RequestError(
                    f"the first {_SAMPLE_CHARACTERS} of {len(text)} characters have {len(sample)} "
                    f"tokens, and the model's limit is {started.max_model_len} tokens for prompt "
                    "and answer together",
                    where=where,
                    hint="Shorten the prompt",
                )
        return tokenizer.encode(text, special)

    await state.long_texts.acquire()
    encoding = asyncio.get_running_loop().run_in_executor(None, encode_long)
    # A request may be given up meanwhile, but not its thread: it has its memory until it is done.
    encoding.add_done_callback(lambda _: state.long_texts.release())
    return await asyncio.shield(encoding)


def _check_tokens(tokens: list[int], vocab_size: int, *, where: str) -> list[int]:
    outside = next((token for token in tokens if token >= vocab_size), None)
    if outside is not None:
        raise RequestError(
            f"token {outside} is not in the vocabulary of {vocab_size} tokens", where=where
        )
    return tokens


def _check_answers(state: ServerState, body: SamplingFields, prompts: int) -> int:
    """How many answers are asked for."""
    answers, most = prompts * (body.n or 1), state.settings.max_answers
    if answers > most:
        raise RequestError(
            f"{answers} answers in one request ({prompts} prompts, n is {body.n or 1}); at most "
            f"{most} are allowed",
            where="n" if prompts <= most and body.n else "prompt",
            hint="Send several requests",
        )
    return answers


def _admitted(
    prefix: str,
    body: SamplingFields,
    started: Started,
    prompts: list[list[int]],
    *,
    limit: int,
    explicit: bool,
) -> Admitted:
    where = "messages" if prefix == "chatcmpl" else "prompt"
    stops = body.stops()
    _check_tokens(list(body.stop_token_ids or ()), started.vocab_size, where="stop_token_ids")
    biased = [token for token, _ in body.bias()]
    _check_tokens(biased, started.vocab_size, where="logit_bias")
    name = f"{prefix}-{uuid.uuid4().hex}"
    choices = body.n or 1
    requests: list[AddRequest] = []
    for index, tokens in enumerate(prompts):
        max_tokens = _fit(len(tokens), limit, started.max_model_len, explicit=explicit, where=where)
        if (body.min_tokens or 0) > max_tokens:
            raise RequestError(
                f"min_tokens is {body.min_tokens}, and the answer may have {max_tokens} tokens",
                where="min_tokens",
                hint="Lower it, or raise max_tokens",
            )
        requests.extend(
            AddRequest(
                request_id=f"{name}-{index * choices + choice}",
                prompt_token_ids=tokens,
                # What is asked for may be the prompt alone; the engine computes a token all the same.
                params=body.sampling(max_tokens=max(1, max_tokens), choice=choice),
                priority=body.priority or 0,
            )
            for choice in range(choices)
        )
    return Admitted(
        id=name,
        requests=tuple(requests),
        stops=tuple(stops),
        choices=choices,
        prompt_tokens=sum(map(len, prompts)),
        echoes=("",) * len(requests),
        continues=prefix == "cmpl",
    )


def _fit(prompt: int, limit: int, max_model_len: int, *, explicit: bool, where: str) -> int:
    """Tokens that may be generated; a default limit shrinks to what fits, an explicit one is kept.

    Where none is asked for, a prompt may fill the model: the token that is computed all the same is fed to nobody.
    """
    room = max_model_len - prompt
    least = min(limit, 1)
    problem: KerfError | None = None
    if prompt == 0:
        problem = RequestError(
            "the prompt has no tokens", where=where, hint="Send at least one token"
        )
    elif room < least:
        excess = ", which leaves no room for an answer within" if least else ", above"
        problem = RequestError(
            f"the prompt has {prompt} tokens{excess} the model's limit of {max_model_len} tokens",
            where=where,
            hint=f"Shorten it to {max_model_len - least} tokens or less",
        )
    elif explicit and limit > room:
        problem = RequestError(
            f"{limit} tokens were requested after a prompt of {prompt} tokens, and the model's "
            f"limit is {max_model_len} tokens for both together",
            where="max_tokens",
            hint=f"Ask for {room} tokens or less, or shorten the prompt",
        )
    if problem is not None:
        raise problem
    return min(limit, room)
