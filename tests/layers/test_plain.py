"""Norms and activations that have one form only: the numbers of torch's own modules."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from kerf_runtime.layers.activation import Activation
from kerf_runtime.layers.norm import LayerNorm


def make_norm() -> tuple[LayerNorm, nn.LayerNorm]:
    torch.manual_seed(0)
    ours, theirs = LayerNorm(24, 1e-3), nn.LayerNorm(24, eps=1e-3)
    for mine, other in ((ours.weight, theirs.weight), (ours.bias, theirs.bias)):
        mine.data = torch.randn(24)
        other.data = mine.data
    return ours, theirs


def test_a_layer_norm_is_that_of_torch() -> None:
    ours, theirs = make_norm()
    x = torch.randn(7, 24)
    torch.testing.assert_close(ours(x), theirs(x))


def test_with_a_residual_the_sum_is_normalised_and_handed_on() -> None:
    ours, theirs = make_norm()
    x, residual = torch.randn(7, 24), torch.randn(7, 24)
    normed, total = ours(x, residual)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed, theirs(x + residual))


def test_a_layer_norm_in_bfloat16_computes_in_float32() -> None:
    ours, _ = make_norm()
    x = torch.randn(7, 24).bfloat16()
    wide = ours(x.float())
    narrow = ours.to(torch.bfloat16)(x)
    assert narrow.dtype is torch.bfloat16
    torch.testing.assert_close(narrow.float(), wide, atol=0.03, rtol=0.02)


@pytest.mark.parametrize(
    ("kind", "reference"),
    [
        ("relu", nn.ReLU()),
        ("gelu", nn.GELU()),
        ("gelu_tanh", nn.GELU(approximate="tanh")),
    ],
)
def test_an_activation_is_that_of_torch(
    kind: Literal["relu", "gelu", "gelu_tanh"], reference: nn.Module
) -> None:
    x: Tensor = torch.linspace(-5, 5, 101)
    assert torch.equal(Activation(kind)(x), reference(x))


def test_the_two_kinds_of_gelu_are_not_the_same() -> None:
    x = torch.linspace(-5, 5, 101)
    assert not torch.equal(Activation("gelu")(x), Activation("gelu_tanh")(x))
