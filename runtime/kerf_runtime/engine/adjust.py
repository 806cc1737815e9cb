"""Changes logits before a token is drawn: penalties, bias, and tokens that may not come yet.

Only the entries concerned are touched: the tokens of all rows are put into one list, so that whatever
the batch there are three small scatters at most.  In this order:

1. repetition (Keskar et al., 2019): logits of tokens in prompt or answer are divided by the penalty if
   positive, else multiplied;
2. frequency and presence: subtracted once per occurrence in the answer, and once if there is any;
3. the bias is added;
4. below ``min_tokens`` tokens that end the request are excluded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kerf_runtime.engine.sample_row import SampleRow
from kerf_runtime.engine.transfer import send

__all__ = ["adjusted"]

_Array = np.ndarray[Any, Any]


def adjusted(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """The logits that tokens are drawn from.

    Args:
        logits: float32 [R, vocab]; not changed.
        rows: R entries.  Each changes its own row alone.

    Returns:
        float32 [R, vocab]; ``logits`` itself if no row asks for a change.
    """
    if not any(row.is_adjusted for row in rows):
        return logits
    result = logits.clone(memory_format=torch.contiguous_format)
    flat, vocab = result.view(-1), logits.shape[-1]
    _penalise(flat, rows, vocab)
    _add_bias(flat, rows, vocab)
    _exclude_ends(flat, rows, vocab)
    return result


def _penalise(flat: Tensor, rows: Sequence[SampleRow], vocab: int) -> None:
    places: list[_Array] = []
    factors: list[_Array] = []
    losses: list[_Array] = []
    for index, row in enumerate(rows):
        params, history = row.params, row.history
        if history is None or not params.has_penalties:
            continue
        tokens, counts = history.generated()
        loss = params.presence_penalty + params.frequency_penalty * counts
        if params.repetition_penalty != 1.0:
            tokens = np.concatenate([tokens, history.prompt_only])
            loss = np.concatenate([loss, np.zeros(len(tokens) - len(loss))])
        places.append(tokens + index * vocab)
        factors.append(np.full(len(tokens), params.repetition_penalty))
        losses.append(loss)
    if sum(map(len, places)) == 0:
        return
    at = send(np.concatenate(places), torch.int64, flat)
    factor = send(np.concatenate(factors), flat.dtype, flat)
    values = flat[at]
    values = torch.where(values > 0, values / factor, values * factor)
    flat[at] = values - send(np.concatenate(losses), flat.dtype, flat)


def _add_bias(flat: Tensor, rows: Sequence[SampleRow], vocab: int) -> None:
    pairs = [
        (index * vocab + token, bias)
        for index, row in enumerate(rows)
        for token, bias in row.params.logit_bias
    ]
    if pairs:
        places, biases = zip(*pairs, strict=True)
        flat[send(places, torch.int64, flat)] += send(biases, flat.dtype, flat)


def _exclude_ends(flat: Tensor, rows: Sequence[SampleRow], vocab: int) -> None:
    places = [
        index * vocab + token
        for index, row in enumerate(rows)
        if row.must_go_on
        for token in _within(row.stop_ids, vocab)
    ]
    if places:
        flat[send(places, torch.int64, flat)] = float("-inf")


def _within(tokens: Iterable[int], vocab: int) -> list[int]:
    """Checkpoints may name an end token that their output layer cannot produce."""
    return sorted(token for token in tokens if 0 <= token < vocab)
