"""The numerical gate: compiled output must agree with eager output before anything is published."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from kerf_runtime.errors import NumericalGateError

__all__ = ["GateResult", "Tolerance", "check_numerics", "tolerance_for"]

_BATCH_SIZES = (1, 2, 7, 32, 61)


@dataclass(frozen=True)
class Tolerance:
    """Largest accepted differences of the logits between compiled and eager."""

    max_abs: float
    max_rel: float
    min_greedy_agreement: float


@dataclass(frozen=True)
class GateResult:
    """What was measured.  ``max_rel_error`` is relative to the largest logit of the row."""

    passed: bool
    max_abs_error: float
    max_rel_error: float
    greedy_agreement: float
    batch_sizes: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """camelCase document for the manifest and the Job's result."""
        return {
            "passed": self.passed,
            "maxAbsError": self.max_abs_error,
            "maxRelError": self.max_rel_error,
            "greedyAgreement": self.greedy_agreement,
            "batchSizes": list(self.batch_sizes),
        }


def tolerance_for(dtype: torch.dtype) -> Tolerance:
    """Stated tolerance per data type: float32 reorders sums only, half types round differently."""
    if dtype is torch.float32:
        return Tolerance(max_abs=1e-2, max_rel=1e-3, min_greedy_agreement=0.99)
    return Tolerance(max_abs=1.0, max_rel=5e-2, min_greedy_agreement=0.90)


@torch.inference_mode()
def check_numerics(
    eager: Callable[[Tensor, Tensor], Tensor],
    compiled: Callable[[Tensor, Tensor], Tensor],
    logits: Callable[[Tensor], Tensor],
    *,
    vocab_size: int,
    max_positions: int,
    device: torch.device,
    tolerance: Tolerance,
) -> GateResult:
    """Compare two forwards on random tokens at several batch sizes.

    Without a forward context's attention metadata the attention op gives zeros in both, so the
    comparison covers everything that was compiled; attention itself is not compiled.

    Raises:
        NumericalGateError: beyond the tolerance; names the numbers.
    """
    generator = torch.Generator(device="cpu").manual_seed(0)
    max_abs = max_rel = 0.0
    agree = total = 0
    for size in _BATCH_SIZES:
        ids = torch.randint(vocab_size, (size,), generator=generator).to(device)
        positions = torch.randint(max_positions, (size,), generator=generator).to(device)
        expected, actual = logits(eager(ids, positions)), logits(compiled(ids, positions))
        difference = (expected - actual).abs()
        # Not a number on one side, or an infinity, is no small difference; on both sides it is none.
        same = expected.isclose(actual, rtol=0, atol=0, equal_nan=True)
        difference = difference.masked_fill(same, 0).nan_to_num(nan=torch.inf, posinf=torch.inf)
        max_abs = max(max_abs, float(difference.max()))
        scale = expected.abs().amax(dim=-1, keepdim=True).nan_to_num(nan=1.0).clamp_min(1e-6)
        max_rel = max(max_rel, float((difference / scale).nan_to_num(nan=torch.inf).max()))
        agree += int((expected.argmax(-1) == actual.argmax(-1)).sum())
        total += size
    agreement = agree / total
    passed = (
        max_abs <= tolerance.max_abs
        and max_rel <= tolerance.max_rel
        and agreement >= tolerance.min_greedy_agreement
    )
    result = GateResult(passed, max_abs, max_rel, agreement, _BATCH_SIZES)
    if not passed:
        raise NumericalGateError(
            f"compiled logits differ from eager ones: max abs {max_abs:.3g} (limit {tolerance.max_abs:g}), "
            f"max rel {max_rel:.3g} (limit {tolerance.max_rel:g}), greedy agreement {agreement:.3f} "
            f"(limit {tolerance.min_greedy_agreement:g}); measured {asdict(result)}",
            hint="Nothing was published. Remove options from compilation.inductorConfig, or set level 0",
        )
    return result
