"""The numerical gate lets through what agrees with eager, and nothing else."""

from __future__ import annotations

import pytest
import torch

from kerf_runtime.compilation.gate import (
    Difference,
    check_numerics,
    checked_sizes,
    tolerance_for,
)
from kerf_runtime.compilation.probe import PieceError
from kerf_runtime.errors import NumericalGateError

VOCAB = 16
TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0)) * 3


def eager(ids, positions):
    return TABLE[ids] + positions.unsqueeze(1) * 0.01


class FakeProbe:
    """Pieces that differ by ``error``, and a model that rounding takes apart by ``noise``."""

    def __init__(self, *, error=0.0, noise=0.0):
        self.worst = PieceError("none", 0.0, 0.02)
        self._error, self._noise = error, noise

    def compared(self, ids, positions):
        self.worst = PieceError("0123abcd", self._error, 0.02)
        return eager(ids, positions)

    def rounded(self, ids, positions):
        return moved(self._noise)(ids, positions)


def moved(distance):
    """A forward whose largest difference from eager is ``distance``."""
    signs = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1)).sign()
    return lambda ids, positions: eager(ids, positions) + distance * signs[ids]


def check(compiled, *, reference=eager, dtype=torch.float32, probe=None, sizes=()):
    return check_numerics(
        reference,
        compiled,
        lambda hidden: hidden,
        probe=probe,
        vocab_size=VOCAB,
        max_positions=100,
        device=torch.device("cpu"),
        tolerance=tolerance_for(dtype),
        static_sizes=sizes,
    )


def test_equal_forwards_pass_with_no_error_at_all():
    result = check(eager)
    assert result.logits == Difference(0, 0, 1)
    assert result.to_json()["batchSizes"][0] == 1


def test_rounding_passes_and_is_reported():
    result = check(lambda ids, positions: eager(ids, positions) * (1 + 1e-5))
    assert 0 < result.logits.max_abs_error < 1e-2
    assert set(result.to_json()) == {
        "passed",
        "maxAbsError",
        "maxRelError",
        "greedyAgreement",
        "batchSizes",
    }


def only_at(size, change):
    def compiled(ids, positions):
        hidden = eager(ids, positions)
        return change(hidden.clone()) if len(ids) == size else hidden

    return compiled


def set_value(value):
    def change(hidden):
        hidden[-1, 3] = value
        return hidden

    return change


@pytest.mark.parametrize("size", [1, 2, 7, 32, 61])
@pytest.mark.parametrize(
    "change",
    [
        lambda hidden: hidden + 0.1,
        lambda hidden: hidden * 1.01,
        lambda hidden: hidden.roll(1, 0) if len(hidden) > 1 else hidden + 1,
        torch.zeros_like,
        set_value(float("nan")),
        set_value(float("inf")),
        set_value(-float("inf")),
        set_value(100.0),
    ],
    ids=["shifted", "scaled", "rows_exchanged", "zeros", "nan", "inf", "minus_inf", "one_value"],
)
def test_a_wrong_result_at_one_batch_size_alone_is_refused_with_the_numbers(size, change):
    with pytest.raises(
        NumericalGateError, match=r"max abs .*limit 0\.01.* greedy agreement"
    ) as raised:
        check(only_at(size, change))
    assert "Nothing was published" in raised.value.hint


def test_compiled_code_that_hides_a_not_a_number_is_refused():
    def broken(ids, positions):
        return set_value(float("nan"))(eager(ids, positions))

    with pytest.raises(NumericalGateError, match=r"the model itself, .* no numbers, at 1 tokens"):
        check(eager, reference=broken)


def test_the_same_infinity_on_both_sides_is_no_difference():
    def masked(ids, positions):
        return set_value(-float("inf"))(eager(ids, positions))

    assert check(masked, reference=masked).logits == Difference(0, 0, 1)


def test_half_precision_may_differ_more_than_float32():
    def rounded(ids, positions):
        return eager(ids, positions).bfloat16().float()

    assert check(rounded, dtype=torch.bfloat16).logits.max_abs_error > 1e-2
    with pytest.raises(NumericalGateError):
        check(rounded, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_piece_that_differs_is_refused_and_named_though_the_logits_agree(dtype):
    refused = r"piece 0123abcd .*1 tokens.* 0\.03 \(limit 0\.02\)"
    with pytest.raises(NumericalGateError, match=refused):
        check(eager, probe=FakeProbe(error=0.03), dtype=dtype)
    with pytest.raises(NumericalGateError, match="0123abcd"):
        check(eager, probe=FakeProbe(error=float("nan")), dtype=dtype)
    result = check(eager, probe=FakeProbe(error=0.01), dtype=dtype)
    assert result.to_json()["piece"] == {"maxRelError": 0.01, "limit": 0.02}


def test_in_half_precision_logits_may_be_as_far_apart_as_rounding_takes_them():
    probe = FakeProbe(noise=4.0)
    with pytest.raises(NumericalGateError, match=r"max abs 6 \(limit 1\)"):
        check(moved(6.0), dtype=torch.bfloat16)
    result = check(moved(6.0), probe=probe, dtype=torch.bfloat16)
    assert result.logits.max_abs_error == pytest.approx(6.0, rel=1e-5)
    assert result.to_json()["rounding"]["maxAbsError"] == pytest.approx(4.0, rel=1e-5)
    assert result.to_json()["limit"]["maxAbsError"] == pytest.approx(12.0, rel=1e-5)
    assert result.to_json()["limit"]["greedyAgreement"] >= 0
    with pytest.raises(NumericalGateError, match=r"max abs 13 \(limit 12\)"):
        check(moved(13.0), probe=probe, dtype=torch.bfloat16)


def test_nobody_asks_what_rounding_does_where_the_logits_agree():
    result = check(moved(0.05), probe=FakeProbe(noise=4.0), dtype=torch.bfloat16)
    assert result.rounding is None
    assert "rounding" not in result.to_json()


def test_in_float32_rounding_is_no_excuse():
    with pytest.raises(NumericalGateError, match=r"limit 0\.01\)"):
        check(moved(0.1), probe=FakeProbe(noise=4.0))


@pytest.mark.parametrize(
    ("sizes", "compared"),
    [
        ((), ()),
        ((16, 1), (1, 16)),
        (range(1, 9), tuple(range(1, 9))),
        (range(8, 257, 8), (8, 40, 72, 112, 144, 184, 216, 256)),
    ],
)
def test_few_static_sizes_are_all_compared_and_of_many_the_ends_and_some_between(sizes, compared):
    assert checked_sizes(sizes) == compared


@pytest.mark.parametrize("row", [0, 255, 256, 599])
def test_every_row_of_a_large_static_size_is_compared(row):
    def wrong(ids, positions):
        hidden = eager(ids, positions).clone()
        if len(ids) == 600:
            hidden[row, 3] += 1
        return hidden

    assert check(eager, sizes=(600,)).static_sizes == (600,)
    with pytest.raises(NumericalGateError, match=r"batch sizes 1, 2, 7, 32, 61, 600"):
        check(wrong, sizes=(600,))
