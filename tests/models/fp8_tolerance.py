"""How far a real model in FP8 may be from the same model unquantised, as ``kerf_runtime.layers.linear`` states."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

TEXT = (
    "The city library opened in 1932 in a small building near the river. For many years it was the only "
    "place in the town where people could read newspapers without paying for them. During the winter, "
    "children came after school because the rooms were warm, and the librarian, Mrs. Hall, read stories "
    "to them. In 1958 the council decided to move the library to a new house on the main street, and the "
    "number of visitors doubled within a year."
)


@dataclass(frozen=True)
class Difference:
    """Of logits [T, vocab]: error in units of a row's spread, share of same greedy tokens, KL in nat."""

    relative_error: float
    greedy_agreement: float
    kl_divergence: float


def difference(found: Tensor, expected: Tensor) -> Difference:
    """Means over positions."""
    found, expected = found.float(), expected.float()
    error = (found - expected).pow(2).mean(-1).sqrt() / expected.std(dim=-1)
    chances = expected.log_softmax(-1)
    divergence = (chances.exp() * (chances - found.log_softmax(-1))).sum(-1)
    agreement = (found.argmax(-1) == expected.argmax(-1)).float()
    return Difference(float(error.mean()), float(agreement.mean()), float(divergence.mean()))


def within_tolerance(found: Tensor, expected: Tensor) -> Difference:
    """The difference, which is asserted to be one that FP8 explains."""
    result = difference(found, expected)
    assert 0.01 < result.relative_error <= 0.25, "0 would mean that nothing was quantised"
    assert result.greedy_agreement >= 0.85
    assert result.kl_divergence <= 0.05
    return result
