"""Messages between the HTTP process and the engine process (msgpack over a Unix socket).  No torch.

HTTP -> engine: ``AddRequest``, ``AbortRequest``, ``Shutdown``.
engine -> HTTP: ``Phase`` while starting, ``Started`` once, then ``Outputs`` per step, ``Stats`` when
numbers changed, ``Refused`` for a request that can never run, ``Alive`` when there was nothing else to say
for a second, ``Failed`` before the engine dies.
"""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = [
    "AbortRequest",
    "AddRequest",
    "Alive",
    "EngineMessage",
    "Failed",
    "Outputs",
    "Phase",
    "Refused",
    "SamplingParams",
    "ServerMessage",
    "Shutdown",
    "Started",
    "Stats",
    "TokenLogprobs",
    "TokenOutput",
]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens of one request are chosen; validated by the server, trusted by the engine.

    Attributes:
        max_tokens: most tokens of the answer.
        temperature: 0 is greedy.
        top_p: keep the most likely tokens that make up this probability; 1 keeps all.
        top_k: keep this many of the most likely tokens; 0 keeps all.
        min_p: drop tokens less likely than this share of the likeliest; 0 drops none.
        presence_penalty: subtracted from the logits of tokens that are in the answer.
        frequency_penalty: subtracted once per time that a token is in the answer.
        repetition_penalty: divides (or multiplies, below 0) the logits of tokens seen in prompt or answer.
        logit_bias: (token, added to its logit), each token once.
        min_tokens: no token ends the request before this many were generated.
        seed: of the random numbers; None draws one.
        ignore_eos: go on after the model's own end tokens.
        stop_token_ids: end a request.
        logprobs: None for none; else how many alternatives to report beside the chosen token.
        prompt_logprobs: report those of the prompt's tokens too, with as many alternatives.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: bool = False

    @property
    def has_penalties(self) -> bool:
        """Whether tokens that were seen before are less (or more) likely."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


class AddRequest(msgspec.Struct, frozen=True, tag=True):
    """Run a prompt.  ``request_id`` is unique among running requests; a lower ``priority`` is sooner."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0


class AbortRequest(msgspec.Struct, frozen=True, tag=True):
    """Stop a request and free its blocks; unknown ids are ignored (it may just have finished)."""

    request_id: str


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Finish nothing more and exit."""


class Phase(msgspec.Struct, frozen=True, tag=True):
    """A start-up phase began.  ``detail`` is for people; ``fraction`` 0..1 or None."""

    name: str
    detail: str = ""
    fraction: float | None = None


class Started(msgspec.Struct, frozen=True, tag=True):
    """The engine is ready.  ``report`` is the static part of ``/debug/graphs`` (see engine.report)."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    report: dict[str, Any]


class Report(msgspec.Struct, frozen=True, tag=True):
    """A newer ``Started.report``: a progressive capture has got further."""

    report: dict[str, Any]


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms of probabilities: of the chosen token, and (token, value) likeliest first."""

    logprob: float
    top: list[tuple[int, float]]


class TokenOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """New tokens of one request.  ``finish_reason``: None, ``stop``, ``length``, ``abort``, ``error``.

    ``logprobs`` has an entry per token if they were asked for, else it is None.  ``cached_tokens`` is told
    with a request's first token: how many of its prompt were in the KV cache.  So is ``prompt_logprobs``, with
    an entry per token of the prompt: None for the first, which follows nothing.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """What one step produced."""

    outputs: list[TokenOutput]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A request cannot run as asked; mirrors ``RequestError``.  Nothing else follows for its id."""

    request_id: str
    what: str
    where: str | None = None
    hint: str | None = None


class Stats(msgspec.Struct, frozen=True, tag=True):
    """The engine's cumulative numbers; ``kerf_runtime.metrics`` turns them into series."""

    values: dict[str, Any]


class Alive(msgspec.Struct, frozen=True, tag=True):
    """The loop is between two steps, or idle."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot go on; mirrors ``KerfError`` (kind is the class name)."""

    kind: str
    what: str
    where: str | None = None
    hint: str | None = None


ServerMessage = AddRequest | AbortRequest | Shutdown
EngineMessage = Phase | Started | Report | Outputs | Refused | Stats | Alive | Failed
