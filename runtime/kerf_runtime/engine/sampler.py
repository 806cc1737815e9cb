"""Chooses the next token of every row of logits.

Random numbers are a pure function of (seed, number of tokens generated so far), see ``seeds``: the same
request gives the same tokens whatever it is batched with, and after a preemption, without any state to
keep.  One uniform number per token is enough: the token is found by inverting the cumulative
distribution.  Before that ``adjust`` applies penalties and biases.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kerf_runtime.engine.adjust import adjusted
from kerf_runtime.engine.sample_row import SampleRow
from kerf_runtime.engine.seeds import uniform
from kerf_runtime.engine.transfer import send

__all__ = ["sample"]


def sample(
    logits: Tensor,
    rows: Sequence[SampleRow],
    *,
    likeliest: Tensor | None = None,
    newest: Tensor | None = None,
) -> Tensor:
    """One token per row; nothing waits for the device.

    Args:
        logits: [R, vocab] in any floating-point data type; not changed.
        rows: R entries.
        likeliest: int64 [R], the argmax of the logits if it is known.
        newest: int64 [R], the token that each row of logits follows; only needed for rows whose history lags.

    Returns:
        int64 [R] on the device of the logits.  Each token depends on its own row alone.
    """
    greedy = all(row.is_greedy for row in rows)
    if greedy and not any(row.is_adjusted for row in rows):
        return logits.argmax(dim=-1) if likeliest is None else likeliest
    logits = adjusted(logits.float(), rows, newest)
    if greedy:
        return logits.argmax(dim=-1)
    tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    # A row takes the same path whatever its neighbours are, or its result could depend on them.
    groups: dict[str, list[int]] = {"greedy": [], "plain": [], "filtered": []}
    for index, row in enumerate(rows):
        groups["greedy" if row.is_greedy else "filtered" if row.is_filtered else "plain"].append(
            index
        )
    for name, indices in groups.items():
        if not indices:
            continue
        places = send(indices, torch.int64, logits)
        part, members = logits[places], [rows[i] for i in indices]
        if name == "greedy":
            chosen = part.argmax(dim=-1)
        elif name == "plain":
            chosen = _invert(_probabilities(part, members), members)
        else:
            chosen = _filtered(part, members)
        tokens[places] = chosen
    return tokens


def _probabilities(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    values = [row.params.temperature for row in rows]
    temperatures = send(values, logits.dtype, logits).unsqueeze(1)
    # Shifted first: a tiny temperature must not turn large logits into infinities.
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    return torch.softmax(shifted / temperatures, dim=-1)


def _invert(probabilities: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Indices at which the cumulative sums pass the rows' random numbers: int64 [R]."""
    sums = probabilities.double().cumsum(dim=-1)
    numbers = [uniform(row.seed, row.step) for row in rows]
    points = send(numbers, torch.float64, sums).unsqueeze(1)
    # right=True: a number equal to a sum belongs to the next token, so one without weight is never hit.
    found = torch.searchsorted(sums, points * sums[:, -1:], right=True).squeeze(1)
    # Only logits that are not numbers get past the end; the token must be one all the same.
    return found.clamp_(max=sums.shape[-1] - 1)


def _filtered(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Top-k, then top-p on what is left, then min-p, all on the distribution after temperature."""
    vocab = logits.shape[-1]
    ordered, order = _probabilities(logits, rows).sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(vocab, device=logits.device)
    limits = [row.params.top_k if 0 < row.params.top_k < vocab else vocab for row in rows]
    kept = send(limits, torch.int64, logits).unsqueeze(1)
    ordered = ordered.masked_fill(ranks >= kept, 0.0)
    ordered = ordered / ordered.sum(dim=-1, keepdim=True)
    top_p = send([row.params.top_p for row in rows], ordered.dtype, ordered).unsqueeze(1)
    # A token stays while the mass before it is below top_p: the first always does.
    before = ordered.cumsum(dim=-1) - ordered
    min_p = send([row.params.min_p for row in rows], ordered.dtype, ordered).unsqueeze(1)
    unlikely = ordered < min_p * ordered[:, :1]
    ordered = ordered.masked_fill(((before >= top_p) | unlikely) & (ranks > 0), 0.0)
    return order.gather(1, _invert(ordered, rows).unsqueeze(1)).squeeze(1)
