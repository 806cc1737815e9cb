"""How likely the chosen token was, and which tokens were likelier.

These are the model's own log probabilities: before penalties, bias, temperature and filters, so that
they do not depend on how tokens are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kerf_runtime.engine.messages import TokenLogprobs
from kerf_runtime.engine.sample_row import SampleRow
from kerf_runtime.engine.transfer import Received, send

__all__ = ["Logprobs", "logprobs_of"]

_LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


@dataclass(frozen=True)
class Logprobs:
    """Log probabilities that a step computes, for the rows that asked for them.

    Attributes:
        asked: row, and how many of the likeliest tokens.
        own: of the chosen tokens, [A, 1].
        values: of the likeliest, [A, most].
        ids: the likeliest, [A, most].
    """

    asked: Sequence[tuple[int, int]]
    own: Received
    values: Received
    ids: Received

    def read(self) -> dict[int, TokenLogprobs]:
        """By row; waits for the step."""
        own, values, ids = self.own.tolist(), self.values.tolist(), self.ids.tolist()
        return {
            index: TokenLogprobs(
                own[place][0], list(zip(ids[place][:count], values[place][:count], strict=True))
            )
            for place, (index, count) in enumerate(self.asked)
        }


def logprobs_of(logits: Tensor, rows: Sequence[SampleRow], tokens: Tensor) -> Logprobs | None:
    """What was asked for, or None if nothing was; nothing waits for the device.

    Args:
        logits: [R, vocab] in any floating-point data type, as the model gave them.
        rows: R entries.
        tokens: int64 [R], the chosen ones.
    """
    wanted = [(i, row.params.logprobs) for i, row in enumerate(rows)]
    asked = [(index, count) for index, count in wanted if count is not None]
    if not asked:
        return None
    places = send([index for index, _ in asked], torch.int64, logits)
    scores = torch.log_softmax(logits[places].float(), dim=-1)
    scores = torch.nan_to_num(scores, nan=_LOWEST, neginf=_LOWEST).clamp_(min=_LOWEST)
    most = min(max(count for _, count in asked), scores.shape[-1])
    top = scores.topk(most, dim=-1)
    own = scores.gather(1, tokens[places].unsqueeze(1))
    return Logprobs(asked, Received(own), Received(top.values), Received(top.indices))
