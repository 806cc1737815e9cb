"""Tables of vectors: one per token, and one per position where positions are learned."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Embedding", "LearnedPositions"]


class Embedding(nn.Module):
    """A table of token vectors, [vocab, E], without ``nn.Embedding``'s random initialisation."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [T] -> [T, E]."""
        return F.embedding(ids, self.weight)


class LearnedPositions(nn.Module):
    """A vector per position, added to that of the token (Gehring et al., 2017).

    Args:
        positions: longest sequence, in tokens.
        width: E.
        offset: rows of the table before that of position 0.
    """

    def __init__(self, positions: int, width: int, *, offset: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(positions + offset, width))
        self.offset = offset

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Token vectors [T, E] and their positions, int64 [T] -> their sum, [T, E]."""
        rows = positions + self.offset if self.offset else positions
        return x + F.embedding(rows, self.weight)
