"""Changes logits before a token is drawn: penalties, bias, and tokens that may not come yet.

Only the entries concerned are touched: the tokens of all rows are put into one list, so that whatever
the batch there are a few small scatters at most.  Where steps overlap, the newest token of a row is known to the
device only: its entry is computed there, from how often the CPU knows it was generated.  In this order:

1. repetition (Keskar et al., 2019): logits of tokens in prompt or answer are divided by the penalty if
   positive, else multiplied;
2. frequency and presence: subtracted once per occurrence in the answer, and once if there is any;
3. the bias is added;
4. below ``min_tokens`` tokens that end the request are excluded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kerf_runtime.engine.sample_row import SampleRow
from kerf_runtime.engine.transfer import send

__all__ = ["adjusted"]

_Array = np.ndarray[Any, Any]


def adjusted(logits: Tensor, rows: Sequence[SampleRow], newest: Tensor | None = None) -> Tensor:
    """The logits that tokens are drawn from.

    Args:
        logits: float32 [R, vocab]; not changed.
        rows: R entries.  Each changes its own row alone.
        newest: int64 [R], the token that each row of logits follows; only needed for rows whose history lags.

    Returns:
        float32 [R, vocab]; ``logits`` itself if no row asks for a change.
    """
    if not any(row.is_adjusted for row in rows):
        return logits
    result = logits.clone(memory_format=torch.contiguous_format)
    flat, vocab = result.view(-1), logits.shape[-1]
    seen = list(_seen(rows))
    _penalise(flat, seen, vocab)
    _penalise_newest(result, logits, seen, newest)
    _add_bias(flat, rows, vocab)
    _exclude_ends(flat, rows, vocab)
    return result


@dataclass(frozen=True)
class _Seen:
    """A row with penalties: its index, itself, which tokens were generated and how often, and those of its prompt alone."""

    index: int
    row: SampleRow
    tokens: _Array
    counts: _Array
    prompt_only: _Array


def _seen(rows: Sequence[SampleRow]) -> Iterator[_Seen]:
    for index, row in enumerate(rows):
        if row.history is not None and row.is_penalised:
            yield _Seen(index, row, *row.history.generated(), row.history.prompt_only)


def _penalise(flat: Tensor, seen: Sequence[_Seen], vocab: int) -> None:
    places: list[_Array] = []
    factors: list[_Array] = []
    losses: list[_Array] = []
    for one in seen:
        params, tokens = one.row.params, one.tokens
        loss = params.presence_penalty + params.frequency_penalty * one.counts
        if params.repetition_penalty != 1.0:
            tokens = np.concatenate([tokens, one.prompt_only])
            loss = np.concatenate([loss, np.zeros(len(tokens) - len(loss))])
        places.append(tokens + one.index * vocab)
        factors.append(np.full(len(tokens), params.repetition_penalty))
        losses.append(loss)
    if sum(map(len, places)) == 0:
        return
    at = send(np.concatenate(places), torch.int64, flat)
    factor = send(np.concatenate(factors), flat.dtype, flat)
    flat[at] = _less_likely(flat[at], factor, send(np.concatenate(losses), flat.dtype, flat))


def _penalise_newest(
    result: Tensor, logits: Tensor, seen: Sequence[_Seen], newest: Tensor | None
) -> None:
    """Of rows whose history lags: what their newest token's entry is once it was counted too."""
    lagging = [one for one in seen if one.row.lags]
    if not lagging:
        return
    assert newest is not None
    places = send([one.index for one in lagging], torch.int64, logits)
    tokens = newest[places]
    params = [one.row.params for one in lagging]
    presence = send([p.presence_penalty for p in params], torch.float64, logits)
    frequency = send([p.frequency_penalty for p in params], torch.float64, logits)
    loss = (presence + frequency * (_times_generated(tokens, lagging) + 1)).to(logits.dtype)
    factor = send([p.repetition_penalty for p in params], logits.dtype, logits)
    result[places, tokens] = _less_likely(logits[places, tokens], factor, loss)


def _times_generated(tokens: Tensor, seen: Sequence[_Seen]) -> Tensor:
    """How often the history of each row has its token: int64 [R] -> int64 [R]."""
    owners = np.arange(len(seen)).repeat([len(one.tokens) for one in seen])
    owner = send(owners, torch.int64, tokens)
    known = send(np.concatenate([one.tokens for one in seen]), torch.int64, tokens)
    counts = send(np.concatenate([one.counts for one in seen]), torch.int64, tokens)
    return torch.zeros_like(tokens).index_add_(0, owner, counts * (known == tokens[owner]))


def _less_likely(values: Tensor, factor: Tensor, loss: Tensor) -> Tensor:
    """Logits after the repetition penalty, and less what is subtracted."""
    return torch.where(values > 0, values / factor, values * factor) - loss


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
