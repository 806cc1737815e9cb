"""The numerical gate: compiled output must agree with eager output before anything is published."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kerf_runtime.compilation.probe import PieceError, difference
from kerf_runtime.errors import NumericalGateError

__all__ = [
    "Difference",
    "GateResult",
    "Probe",
    "Tolerance",
    "check_numerics",
    "checked_sizes",
    "tolerance_for",
]

Forward = Callable[[Tensor, Tensor], Tensor]


class Probe(Protocol):
    """What is asked of ``probe.PieceProbe``."""

    compared: Callable[..., Tensor]
    rounded: Callable[..., Tensor]
    worst: PieceError


_HINT = "Nothing was published. Remove options from compilation.inductorConfig, or set level 0"

_BATCH_SIZES = (1, 2, 7, 32, 61)
_MOST_STATIC_SIZES = 8
_ROWS = 256
"""Logits are compared so many rows at a time: those of a large batch would not fit beside the model."""

_ROUNDINGS = 3.0
"""How many times as far as one more rounding takes it the compiled model may be from the eager one."""


@dataclass(frozen=True)
class Difference:
    """How far two forwards are apart, or may be.  ``max_rel_error`` is relative to the largest logit of the row."""

    max_abs_error: float
    max_rel_error: float
    greedy_agreement: float

    def within(self, limit: Difference) -> bool:
        """Whether it is no larger than ``limit``."""
        return (
            self.max_abs_error <= limit.max_abs_error
            and self.max_rel_error <= limit.max_rel_error
            and self.greedy_agreement >= limit.greedy_agreement
        )

    def to_json(self) -> dict[str, Any]:
        """camelCase document."""
        return {
            "maxAbsError": self.max_abs_error,
            "maxRelError": self.max_rel_error,
            "greedyAgreement": self.greedy_agreement,
        }


@dataclass(frozen=True)
class Tolerance:
    """Largest accepted differences between compiled and eager: of the logits, and of any piece by itself.

    ``roundings``: how many times as much as rounding does is accepted where that is more; 0 for no more.
    """

    logits: Difference
    max_piece_rel: float
    roundings: float


@dataclass(frozen=True)
class GateResult:
    """What was measured.

    Attributes:
        logits: of compiled and eager.
        piece: the compiled piece that came nearest to what is accepted of it.
        static_sizes: numbers of tokens with code of their own that were compared beside ``batchSizes``.
        rounding: of the eager model and itself with every piece's result moved by up to one unit in the last
            place; None where nobody had to know.
    """

    logits: Difference
    piece: PieceError | None = None
    rounding: Difference | None = None
    limit: Difference | None = None
    """What was accepted of the logits, where rounding made it more than the tolerance."""
    static_sizes: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """camelCase document for the manifest and the Job's result."""
        document = {
            "passed": True,
            **self.logits.to_json(),
            "batchSizes": list(_BATCH_SIZES),
        }
        if self.static_sizes:
            document["staticSizes"] = list(self.static_sizes)
        if self.piece is not None:
            document["piece"] = {"maxRelError": self.piece.error, "limit": self.piece.limit}
        if self.rounding is not None:
            document["rounding"] = self.rounding.to_json()
        if self.limit is not None:
            document["limit"] = self.limit.to_json()
        return document


def tolerance_for(dtype: torch.dtype) -> Tolerance:
    """Stated tolerance per data type: float32 reorders sums only, half types round differently."""
    if dtype is torch.float32:
        return Tolerance(Difference(1e-2, 1e-3, 0.99), max_piece_rel=1e-3, roundings=0)
    return Tolerance(Difference(1.0, 5e-2, 0.90), max_piece_rel=5e-2, roundings=_ROUNDINGS)


@torch.inference_mode()
def check_numerics(
    eager: Forward,
    compiled: Forward,
    logits: Callable[[Tensor], Tensor],
    *,
    probe: Probe | None = None,
    vocab_size: int,
    max_positions: int,
    device: torch.device,
    tolerance: Tolerance,
    static_sizes: Sequence[int] = (),
) -> GateResult:
    """Compare two forwards on random tokens at several batch sizes, and every compiled piece with its program.

    Sizes with code of their own come on top, as many of them as ``checked_sizes`` says.

    Without a forward context's attention metadata the attention op gives zeros in both, so the
    comparison covers everything that was compiled; attention itself is not compiled.

    In half types a deep model may make much of little: where rounding every piece's result once more takes the
    eager model's logits beyond the stated tolerance, the compiled ones may be that far away, times a factor.  Of
    pieces, which are short, less is accepted; ``probe`` knows how much.

    Raises:
        NumericalGateError: beyond the tolerance; names the numbers.
    """
    own_code = checked_sizes(static_sizes)
    # Last, and again where a size is among the others: the first call of a piece takes the general code.
    sizes = (*_BATCH_SIZES, *own_code)
    batches = _batches(sizes, vocab_size, max_positions, device)
    apart = _compare(eager, compiled, logits, batches)
    rounding, limit = None, tolerance.logits
    if probe is not None:
        for ids, positions in batches:
            probe.compared(ids, positions)
            worst = probe.worst
            if not worst.share <= 1:
                raise NumericalGateError(
                    f"compiled piece {worst.piece} differs from its program on the same inputs, {len(ids)} "
                    f"tokens: max rel {worst.error:.3g} (limit {worst.limit:.3g})",
                    hint=_HINT,
                )
        if tolerance.roundings and not apart.within(limit):
            rounding = _compare(eager, probe.rounded, logits, batches)
            limit = _loosened(limit, rounding, tolerance.roundings)
    if not apart.within(limit):
        raise NumericalGateError(
            f"compiled logits differ from eager ones: max abs {apart.max_abs_error:.3g} (limit "
            f"{limit.max_abs_error:.3g}), max rel {apart.max_rel_error:.3g} (limit {limit.max_rel_error:.3g}), greedy "
            f"agreement {apart.greedy_agreement:.3f} (limit {limit.greedy_agreement:.3g}), at batch sizes "
            f"{', '.join(map(str, sizes))}",
            hint=_HINT,
        )
    loosened = None if limit is tolerance.logits else limit
    worst_piece = None if probe is None else probe.worst
    return GateResult(apart, worst_piece, rounding, loosened, own_code)


def checked_sizes(static_sizes: Sequence[int]) -> tuple[int, ...]:
    """Which static sizes are compared: all of a few; of many the smallest, the largest and some evenly between."""
    sizes = sorted(set(static_sizes))
    if len(sizes) <= _MOST_STATIC_SIZES:
        return tuple(sizes)
    last = len(sizes) - 1
    return tuple(
        sizes[index * last // (_MOST_STATIC_SIZES - 1)] for index in range(_MOST_STATIC_SIZES)
    )


def _batches(
    sizes: Sequence[int], vocab_size: int, max_positions: int, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """Random token ids and positions."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    return [
        (
            torch.randint(vocab_size, (size,), generator=generator).to(device),
            torch.randint(max_positions, (size,), generator=generator).to(device),
        )
        for size in sizes
    ]


def _compare(
    eager: Forward,
    other: Forward,
    logits: Callable[[Tensor], Tensor],
    batches: Sequence[tuple[Tensor, Tensor]],
) -> Difference:
    max_abs = max_rel = 0.0
    agree = total = 0
    for ids, positions in batches:
        hidden = zip(
            eager(ids, positions).split(_ROWS), other(ids, positions).split(_ROWS), strict=True
        )
        for expected, actual in ((logits(one), logits(two)) for one, two in hidden):
            if bool(expected.isnan().any()):
                raise NumericalGateError(
                    "the model itself, before anything is compiled, gives logits that are no numbers, "
                    f"at {len(ids)} tokens",
                    hint="Its weights are damaged, or too large for engine.dtype",
                )
            absolute, relative = difference(expected, actual)
            max_abs, max_rel = max(max_abs, absolute), max(max_rel, relative)
            agree += int((expected.argmax(-1) == actual.argmax(-1)).sum())
        total += len(ids)
    return Difference(max_abs, max_rel, agree / total)


def _loosened(limit: Difference, rounding: Difference, times: float) -> Difference:
    """The limit, or what rounding does so many times where that is more."""
    agreement = 1 - times * (1 - rounding.greedy_agreement)
    return Difference(
        max(limit.max_abs_error, times * rounding.max_abs_error),
        max(limit.max_rel_error, times * rounding.max_rel_error),
        max(0.0, min(limit.greedy_agreement, agreement)),
    )
