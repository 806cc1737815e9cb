"""The numerical gate lets through what agrees with eager, and nothing else."""

from __future__ import annotations

import pytest
import torch

from kerf_runtime.compilation.gate import check_numerics, tolerance_for
from kerf_runtime.errors import NumericalGateError

VOCAB = 16
TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0)) * 3


def eager(ids, positions):
    return TABLE[ids] + positions.unsqueeze(1) * 0.01


def check(compiled, *, reference=eager, dtype=torch.float32):
    return check_numerics(
        reference,
        compiled,
        lambda hidden: hidden,
        vocab_size=VOCAB,
        max_positions=100,
        device=torch.device("cpu"),
        tolerance=tolerance_for(dtype),
    )


def test_equal_forwards_pass_with_no_error_at_all():
    result = check(eager)
    assert result.passed
    assert (result.max_abs_error, result.max_rel_error, result.greedy_agreement) == (0, 0, 1)
    assert result.batch_sizes[0] == 1


def test_rounding_passes_and_is_reported():
    result = check(lambda ids, positions: eager(ids, positions) * (1 + 1e-5))
    assert result.passed
    assert 0 < result.max_abs_error < 1e-2
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

    with pytest.raises(NumericalGateError):
        check(eager, reference=broken)


def test_the_same_infinity_on_both_sides_is_no_difference():
    def masked(ids, positions):
        return set_value(-float("inf"))(eager(ids, positions))

    assert check(masked, reference=masked).passed


def test_half_precision_may_differ_more_than_float32():
    def rounded(ids, positions):
        return eager(ids, positions).bfloat16().float()

    assert check(rounded, dtype=torch.bfloat16).passed
    with pytest.raises(NumericalGateError):
        check(rounded, dtype=torch.float32)
