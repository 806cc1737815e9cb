"""Activation-quant fusion: every form is found once per layer, and nothing that must stay is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.compilation.passes.harness import assert_same, run_passes
from tests.compilation.passes.layers import (
    SILU_AND_MUL,
    ActivationQuant,
    F,
    kerf,
    quantiser,
    tokens,
)
from torch import Tensor

from kerf_runtime.compilation.counters import compilation_counter

SCALE = torch.full((1,), 0.02)
KINDS = {
    "static": kerf.silu_and_mul_static_fp8_quant.default,
    "dynamic": kerf.silu_and_mul_dynamic_per_token_fp8_quant.default,
}
BOTH = pytest.mark.parametrize("form", ["custom", "native"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quant", ["custom", "native"])
@pytest.mark.parametrize("act", ["custom", "native"])
def test_an_activation_and_its_quantisation_become_one_operator_in_every_layer(
    kind: str, act: str, quant: str
) -> None:
    model, x = ActivationQuant(3, act, quantiser(kind, quant)), tokens(9)
    with compilation_counter.expect(activation_quant_matches=3):
        result = run_passes(model, x)
    assert result.matches == {"activation_quant_fusion": 3}
    assert result.count(KINDS[kind]) == 3
    assert result.count(torch.ops.aten.exp.default, kerf.silu_and_mul.default) == 0
    assert_same(result.outputs, model(x))


@pytest.mark.parametrize("count", [1, 8])
def test_the_native_form_is_found_for_a_static_number_of_tokens(count: int) -> None:
    model, x = ActivationQuant(2, "native", quantiser("static", "native")), tokens(count)
    result = run_passes(model, x, static=True)
    assert result.matches == {"activation_quant_fusion": 2}
    assert_same(result.outputs, model(x))


@BOTH
def test_an_activation_with_another_user_is_not_fused(form: str) -> None:
    def model(x: Tensor) -> Any:
        activated = SILU_AND_MUL[form](x)
        return quantiser("static", form)(activated, SCALE)[0], activated * 2

    assert run_passes(model, tokens(4, width=2 * F)).matches == {}


def test_an_activation_of_two_tensors_is_no_match() -> None:
    def model(gate: Tensor, up: Tensor) -> Any:
        return quantiser("static", "native")(torch.nn.functional.silu(gate) * up, SCALE)[0]

    assert run_passes(model, tokens(4), tokens(4) + 1).matches == {}


def test_gate_and_up_in_the_other_order_are_no_match() -> None:
    def model(x: Tensor) -> Any:
        up, gate = x.chunk(2, dim=-1)
        return quantiser("static", "native")(torch.nn.functional.silu(gate) * up, SCALE)[0]

    assert run_passes(model, tokens(4, width=2 * F)).matches == {}


def test_two_of_three_parts_are_no_match() -> None:
    def model(x: Tensor) -> Any:
        gate, up, _ = x.split(F, dim=-1)
        return quantiser("static", "native")(torch.nn.functional.silu(gate) * up, SCALE)[0]

    assert run_passes(model, tokens(4, width=3 * F)).matches == {}


def test_another_activation_is_no_match() -> None:
    def model(x: Tensor) -> Any:
        gate, up = x.chunk(2, dim=-1)
        return quantiser("static", "native")(torch.nn.functional.gelu(gate) * up, SCALE)[0]

    assert run_passes(model, tokens(4, width=2 * F)).matches == {}


def test_an_activation_that_is_not_quantised_stays() -> None:
    result = run_passes(lambda x: kerf.silu_and_mul(x), tokens(4, width=2 * F))
    assert result.matches == {}
    assert result.count(kerf.silu_and_mul.default) == 1
