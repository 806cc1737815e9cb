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
        computed: tokens whose keys and values are in the cache.
        blocks: cache blocks in order of position; owned by this request alone.
        was_scheduled: whether a step has run it yet.
    """

    request_id: str
    tokens: list[int]
    prompt_length: int
    params: SamplingParams
    stop_ids: frozenset[int]
    seed: int
    arrived: float
    state: RequestState = RequestState.WAITING
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    was_scheduled: bool = False

    @property
    def remaining(self) -> int:
        """Tokens that are known but not yet computed: 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_length

    def append(self, token: int, max_model_len: int) -> str | None:
        """Add a generated token; returns why the request is over, or None."""
        self.tokens.append(token)
        if token in self.stop_ids:
            return FinishReason.STOP
        if self.generated >= self.params.max_tokens or len(self.tokens) >= max_model_len:
            return FinishReason.LENGTH
        return None
