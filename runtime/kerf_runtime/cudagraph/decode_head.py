"""What full graphs of decode batches compute beside hidden states: logits, and the likeliest token of each row.

A small decode step is over before Python has launched the output layer and the choice of a token behind it, so the
device would wait for them.  Inside the graph they cost no launch.  Large batches take longer than those launches,
and their logits would be the largest buffer of all graphs: they stay outside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["LOGITS_BYTES", "DecodeHead", "Decoded", "ForwardOutput"]

LOGITS_BYTES = 16 * 2**20
"""Most that the logits of a graph may take; graphs share a pool, so it is taken once."""


class Decoded(NamedTuple):
    """Of a decode batch of T rows, padding included.

    Attributes:
        logits: [T, vocab] in the model's data type; overwritten by the next replay of any graph.
        likeliest: int64 [T], their argmax; overwritten by the next replay of a graph that computes one.
    """

    logits: Tensor
    likeliest: Tensor


class ForwardOutput(NamedTuple):
    """What one forward gives.

    Attributes:
        hidden: [T, E]; overwritten by the next replay of any graph.
        decoded: what the graph computed from it, if it is one that does.
    """

    hidden: Tensor
    decoded: Decoded | None = None


class DecodeHead:
    """Computes logits and greedy tokens of the decode graphs of one model.

    The tokens have a place of their own, outside the graphs' memory: the next step reads them.

    Args:
        compute_logits: [R, E] -> [R, vocab].
        vocab_size: of the model.
        dtype: of its logits.
        largest: rows of the largest graph.
        device: of the model.
    """

    def __init__(
        self,
        compute_logits: Callable[[Tensor], Tensor],
        *,
        vocab_size: int,
        dtype: torch.dtype,
        largest: int,
        device: torch.device,
    ) -> None:
        self._compute_logits = compute_logits
        self.rows = min(largest, LOGITS_BYTES // (vocab_size * dtype.itemsize))
        """Of the largest decode graph that computes logits; 0 if none does."""
        self._likeliest = torch.zeros(self.rows, dtype=torch.int64, device=device)

    def __call__(self, hidden: Tensor) -> Decoded:
        """Of the hidden states [T, E] of a batch of at most ``rows``."""
        logits = self._compute_logits(hidden)
        likeliest = self._likeliest[: len(hidden)]
        torch.argmax(logits, dim=-1, out=likeliest)
        return Decoded(logits, likeliest)

    def warm_up(self, hidden: Tensor) -> None:
        """Use the same kernels once; the tokens of a step that is running stay."""
        if len(hidden) <= self.rows:
            self._compute_logits(hidden).argmax(dim=-1)
