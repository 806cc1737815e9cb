"""What the sampler must know of one request: its parameters, its position, the tokens it has seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from kerf_runtime.engine.messages import SamplingParams

__all__ = ["SampleRow", "TokenHistory"]

_GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: the distribution is a single token in float32 anyway."""

_Array = np.ndarray[Any, Any]


class TokenHistory:
    """Which tokens a request has seen, for penalties; follows the request's list at little cost.

    Args:
        prompt: token ids of the prompt.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._prompt_only: _Array = np.unique(np.asarray(prompt, dtype=np.int64))
        self._counts: dict[int, int] = {}
        self._read = len(prompt)

    def follow(self, tokens: Sequence[int]) -> TokenHistory:
        """Read what was appended to ``tokens`` (prompt, then answer) since the last call."""
        for token in tokens[self._read :]:
            seen = self._counts.get(token, 0)
            if not seen:
                self._prompt_only = self._prompt_only[self._prompt_only != token]
            self._counts[token] = seen + 1
        self._read = len(tokens)
        return self

    @property
    def prompt_only(self) -> _Array:
        """int64 [P]: distinct tokens of the prompt that were not generated."""
        return self._prompt_only

    def generated(self) -> tuple[_Array, _Array]:
        """Distinct generated tokens, int64 [G], and how often each was generated, int64 [G]."""
        size = len(self._counts)
        return (
            np.fromiter(self._counts.keys(), dtype=np.int64, count=size),
            np.fromiter(self._counts.values(), dtype=np.int64, count=size),
        )


class SampleRow(msgspec.Struct, frozen=True):
    """How one row of logits is sampled.

    Attributes:
        params: of the request.
        seed: of the request's random numbers.
        step: tokens generated before.
        history: what was seen so far; only needed for penalties.
        lags: whether the history lacks the token that the logits follow, which only the device knows yet.
        stop_ids: tokens that end the request; only needed below ``min_tokens``.
    """

    params: SamplingParams
    seed: int
    step: int
    history: TokenHistory | None = None
    lags: bool = False
    stop_ids: frozenset[int] = frozenset()

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.params.temperature < _GREEDY_BELOW

    @property
    def is_filtered(self) -> bool:
        """Whether unlikely tokens are cut off."""
        params = self.params
        return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0

    @property
    def must_go_on(self) -> bool:
        """Whether the answer is too short to end."""
        return self.step < self.params.min_tokens and bool(self.stop_ids)

    @property
    def is_penalised(self) -> bool:
        """Whether tokens that were seen become less likely."""
        return self.history is not None and self.params.has_penalties

    @property
    def is_adjusted(self) -> bool:
        """Whether logits change before the draw."""
        return self.is_penalised or bool(self.params.logit_bias) or self.must_go_on
