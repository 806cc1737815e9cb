"""The add of a residual leaves the matrix product that Inductor put it in; a bias stays."""

from __future__ import annotations

import torch
from tests.compilation.passes.harness import assert_same, run_passes
from torch import Tensor

from kerf_runtime.compilation.counters import compilation_counter

aten = torch.ops.aten
WEIGHT, BIAS = torch.randn(16, 16), torch.randn(16)


def residual(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    total = x + y @ WEIGHT
    return total, total.relu()


def reversed_residual(x: Tensor, y: Tensor) -> Tensor:
    return y @ WEIGHT + x


def biased(x: Tensor, y: Tensor) -> Tensor:
    return torch.addmm(BIAS, x + y, WEIGHT)


def scaled(x: Tensor, y: Tensor) -> Tensor:
    return torch.addmm(x, y, WEIGHT, beta=0.5)


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(5, 16), torch.randn(5, 16)


def test_a_residual_is_added_by_itself() -> None:
    for function in (residual, reversed_residual):
        with compilation_counter.expect(matrix_add_matches=1):
            result = run_passes(function, *inputs())
        assert result.count(aten.addmm.default) == 0
        assert result.count(aten.mm.default) == result.count(aten.add.Tensor) == 1
        assert_same(result.outputs, function(*inputs()))


def test_a_bias_and_a_scaled_addend_stay_in_the_product() -> None:
    for function in (biased, scaled):
        with compilation_counter.expect(matrix_add_matches=0):
            result = run_passes(function, *inputs())
        assert result.count(aten.addmm.default) == 1
        assert_same(result.outputs, function(*inputs()))
