"""How likely the chosen token was, and which tokens were likelier.

These are the model's own log probabilities: before penalties, bias, temperature and filters, so that
they do not depend on how tokens are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kerf_runtime.engine.messages import TokenLogprobs
from kerf_runtime.engine.sample_row import SampleRow
from kerf_runtime.engine.transfer import send

__all__ = ["logprobs_of"]

_LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def logprobs_of(
    logits: Tensor, rows: Sequence[SampleRow], tokens: Sequence[int]
) -> list[TokenLogprobs | None]:
    """One entry per row, None where none was asked for.

    Args:
        logits: float32 [R, vocab], as the model gave them.
        rows: R entries.
        tokens: R chosen tokens.
    """
    result: list[TokenLogprobs | None] = [None] * len(rows)
    wanted = [(i, row.params.logprobs) for i, row in enumerate(rows)]
    asked = [(index, count) for index, count in wanted if count is not None]
    if not asked:
        return result
    indices = [index for index, _ in asked]
    scores = torch.log_softmax(logits[send(indices, torch.int64, logits)], dim=-1)
    scores = torch.nan_to_num(scores, nan=_LOWEST, neginf=_LOWEST).clamp_(min=_LOWEST)
    chosen = send([tokens[index] for index in indices], torch.int64, logits).unsqueeze(1)
    most = min(max(count for _, count in asked), scores.shape[-1])
    top = scores.topk(most, dim=-1)
    own, values, ids = (t.tolist() for t in (scores.gather(1, chosen), top.values, top.indices))
    for place, (index, count) in enumerate(asked):
        result[index] = TokenLogprobs(
            own[place][0], list(zip(ids[place][:count], values[place][:count], strict=True))
        )
    return result
