"""One request inside the engine: its tokens, its progress, its cache blocks.  Pure, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kerf_runtime.engine.messages import SamplingParams

__all__ = ["FinishReason", "Request", "RequestState"]


class RequestState(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason:
    """Values of ``TokenOutput.finish_reason``."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(eq=False)
class Request:
    """A prompt, what was generated from it, and how much of both is in the KV cache.

    Attributes:
        request_id: unique among live requests.
        tokens: the prompt, then every generated token.
        prompt_length: how many of ``tokens`` are the prompt.
        params: how tokens are chosen.
        stop_ids: tokens that end the request, the model's own included unless they are ignored.
        seed: of this request's random numbers.
        arrived: monotonic seconds.
        place: what requests are served by, the smallest first; no two requests have the same.
        max_length: tokens with which the answer is as long as it may be.
        computed: tokens whose keys and values are in the cache, or will be after the steps that were
            scheduled.
        pending: tokens that scheduled steps will yield; they come after ``tokens``.
        blocks: cache blocks in order of position.  Full ones may have other owners too.  The list is
            replaced or grows, and never changes otherwise.
        block_keys: of the leading full blocks, as far as they were needed.
        state_slot: where the states of state-space layers are while it runs; None before and after.
        published: leading blocks that others can find.
        cached_tokens: of the prompt, found in the cache when the request was first admitted.
        was_scheduled: whether a step has run it yet.
        was_deferred: whether it was left waiting for a step that fills what it can use.
    """

    request_id: str
    tokens: list[int]
    prompt_length: int
    params: SamplingParams
    stop_ids: frozenset[int]
    seed: int
    arrived: float
    place: tuple[float, int]
    max_length: int
    state: RequestState = RequestState.WAITING
    computed: int = 0
    pending: int = 0
    blocks: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)
    state_slot: int | None = None
    published: int = 0
    cached_tokens: int = 0
    was_scheduled: bool = False
    was_deferred: bool = False
    has_penalties: bool = field(init=False)
    """Whether tokens that were seen before change how the next is drawn."""

    def __post_init__(self) -> None:
        self.has_penalties = self.params.has_penalties

    @property
    def remaining(self) -> int:
        """Tokens that are known or pending, and not yet computed: 1 while decoding."""
        return len(self.tokens) + self.pending - self.computed

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def is_ending(self) -> bool:
        """Whether the pending token is the last one, whatever it will be."""
        return self.pending > 0 and len(self.tokens) + self.pending >= self.max_length

    def append(self, token: int) -> str | None:
        """Add a generated token; returns why the request is over, or None."""
        self.tokens.append(token)
        if token in self.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self.max_length else None
