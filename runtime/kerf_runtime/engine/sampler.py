"""Chooses the next token of every row of logits.

Random numbers are a pure function of (seed, number of tokens generated so far): the same request gives
the same tokens whatever it is batched with, and after a preemption, without any state to keep.  One
uniform number per token is enough: the token is found by inverting the cumulative distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kerf_runtime.engine.messages import SamplingParams

__all__ = ["SampleRow", "sample", "uniform"]

_GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: the distribution is a single token in float32 anyway."""
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class SampleRow:
    """How one row is sampled; ``step`` counts the tokens generated before."""

    params: SamplingParams
    seed: int
    step: int

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.params.temperature < _GREEDY_BELOW

    @property
    def is_filtered(self) -> bool:
        """Whether unlikely tokens are cut off."""
        return self.params.top_k > 0 or self.params.top_p < 1.0


def uniform(seed: int, step: int) -> float:
    """A number in [0, 1) that depends on ``seed`` and ``step`` only.

    The finaliser of SplitMix64 (Steele, Lea and Flood, 2014), applied to the seed and then to the
    position, so that neighbouring seeds and steps give unrelated numbers.
    """
    return (_mix(_mix(seed & _MASK) + step) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """One token per row.

    Args:
        logits: float32 [R, vocab].
        rows: R entries.

    Returns:
        R token ids.  Each depends on its own row alone.
    """
    if all(row.is_greedy for row in rows):
        greedy: list[int] = logits.argmax(dim=-1).tolist()
        return greedy
    tokens = [0] * len(rows)
    # A row takes the same path whatever its neighbours are, or its result could depend on them.
    groups: dict[str, list[int]] = {"greedy": [], "plain": [], "filtered": []}
    for index, row in enumerate(rows):
        groups["greedy" if row.is_greedy else "filtered" if row.is_filtered else "plain"].append(
            index
        )
    for name, indices in groups.items():
        if not indices:
            continue
        part, members = logits[_send(indices, torch.int64, logits)], [rows[i] for i in indices]
        if name == "greedy":
            chosen = part.argmax(dim=-1)
        elif name == "plain":
            chosen = _invert(_probabilities(part, members), members)
        else:
            chosen = _filtered(part, members)
        for index, token in zip(indices, chosen.tolist(), strict=True):
            tokens[index] = token
    return tokens


def _send(values: Sequence[float], dtype: torch.dtype, beside: Tensor) -> Tensor:
    """``values`` as a tensor on the device of ``beside``, without waiting for the device."""
    on_gpu = beside.device.type != "cpu"
    return torch.tensor(values, dtype=dtype, pin_memory=on_gpu).to(beside.device, non_blocking=True)


def _probabilities(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    values = [row.params.temperature for row in rows]
    temperatures = _send(values, logits.dtype, logits).unsqueeze(1)
    # Shifted first: a tiny temperature must not turn large logits into infinities.
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    return torch.softmax(shifted / temperatures, dim=-1)


def _invert(probabilities: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Indices at which the cumulative sums pass the rows' random numbers: int64 [R]."""
    sums = probabilities.double().cumsum(dim=-1)
    numbers = [uniform(row.seed, row.step) for row in rows]
    points = _send(numbers, torch.float64, sums).unsqueeze(1)
    # right=True: a number equal to a sum belongs to the next token, so one without weight is never hit.
    found = torch.searchsorted(sums, points * sums[:, -1:], right=True).squeeze(1)
    # Only logits that are not numbers get past the end; the token must be one all the same.
    return found.clamp_(max=sums.shape[-1] - 1)


def _filtered(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Top-k, then top-p on what is left, both on the distribution after temperature."""
    vocab = logits.shape[-1]
    ordered, order = _probabilities(logits, rows).sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(vocab, device=logits.device)
    limits = [row.params.top_k if 0 < row.params.top_k < vocab else vocab for row in rows]
    kept = _send(limits, torch.int64, logits).unsqueeze(1)
    ordered = ordered.masked_fill(ranks >= kept, 0.0)
    ordered = ordered / ordered.sum(dim=-1, keepdim=True)
    top_p = _send([row.params.top_p for row in rows], ordered.dtype, ordered).unsqueeze(1)
    # A token stays while the mass before it is below top_p: the first always does.
    before = ordered.cumsum(dim=-1) - ordered
    ordered = ordered.masked_fill((before >= top_p) & (ranks > 0), 0.0)
    return order.gather(1, _invert(ordered, rows).unsqueeze(1)).squeeze(1)
