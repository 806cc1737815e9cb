"""Attention-quant fusion: attention writes FP8 where its output is only quantised."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.compilation.passes.attention import one_prompt
from tests.compilation.passes.harness import Result, assert_same, run_passes
from tests.compilation.passes.layers import (
    HEADS,
    AttentionQuant,
    E,
    attention_layer_names,
    kerf,
    quantiser,
    tokens,
)
from torch import Tensor

from kerf_runtime.compilation.counters import compilation_counter

ATTENTION = kerf.attention.default
LAYERS = attention_layer_names(3)


def run(model: torch.nn.Module, count: int = 7, **options: Any) -> Result:
    x = tokens(count)
    with one_prompt(count, LAYERS), torch.no_grad():
        expected = model(x)
    with one_prompt(count, LAYERS):
        result = run_passes(model, x, **options)
    assert_same(result.outputs, expected)
    return result


@pytest.mark.parametrize("form", ["custom", "native"])
def test_attention_writes_float8_in_every_layer(form: str) -> None:
    with compilation_counter.expect(attention_quant_matches=3, functionalization_matches=3):
        result = run(AttentionQuant(3, quantiser("static", form)))
    assert result.matches == {"attention_quant_fusion": 3, "fix_functionalization": 3}
    calls = [node for node in result.graph.nodes if node.target is ATTENTION]
    assert [call.args[3].meta["val"].dtype for call in calls] == [torch.float8_e4m3fn] * 3
    assert all(call.args[5] is not None for call in calls)
    assert result.count(kerf.static_scaled_fp8_quant.default) == 0


@pytest.mark.parametrize("count", [1, 8])
def test_attention_writes_float8_for_a_static_number_of_tokens(count: int) -> None:
    result = run(AttentionQuant(2, quantiser("static", "native")), count, static=True)
    assert result.matches["attention_quant_fusion"] == 2


def test_a_dynamic_scale_is_not_known_before_attention() -> None:
    result = run(AttentionQuant(2, quantiser("dynamic", "custom")))
    assert result.matches == {"fix_functionalization": 2}


class _OneLayer(AttentionQuant):
    def __init__(self) -> None:
        super().__init__(1, quantiser("static", "custom"))


class _SeenByOthers(_OneLayer):
    def forward(self, x: Tensor) -> Any:
        attended = self.attend(x, 0)
        return self.quant(attended, self.scale(0))[0], attended + 1


class _QuantisedTwice(_OneLayer):
    def forward(self, x: Tensor) -> Any:
        attended = self.attend(x, 0)
        scales = self.scale(0), self.scale(0) * 2
        return tuple(self.quant(attended, scale)[0] for scale in scales)


class _ScaleOfTheResult(_OneLayer):
    def forward(self, x: Tensor) -> Any:
        attended = self.attend(x, 0)
        scale = self.scale(0) + 0 * attended.float().sum().reshape(1)
        return self.quant(attended, scale)[0]


class _Permuted(_OneLayer):
    """The quantised tensor is contiguous in another order than the output of attention."""

    def forward(self, x: Tensor) -> Any:
        q = (x @ self.matrices[0]).view(-1, HEADS, E // HEADS)
        output = torch.empty_like(q)
        kerf.attention(q, q, q, output, "layer.0")
        return self.quant(output.transpose(1, 2).flatten(1), self.scale(0))[0]


class _OldContentMatters(_OneLayer):
    """Attention may leave rows of padding alone: only an uninitialised buffer may be exchanged."""

    def forward(self, x: Tensor) -> Any:
        q = (x @ self.matrices[0]).view(-1, HEADS, E // HEADS)
        output = torch.ones_like(q)
        kerf.attention(q, q, q, output, "layer.0")
        return self.quant(output.view(-1, E), self.scale(0))[0]


class _ScaledAlready(_OneLayer):
    def forward(self, x: Tensor) -> Any:
        q = (x @ self.matrices[0]).view(-1, HEADS, E // HEADS)
        output = torch.empty_like(q, dtype=torch.float8_e4m3fn)
        kerf.attention(q, q, q, output, "layer.0", self.scale(0))
        return self.quant(output.view(-1, E).to(q.dtype), self.scale(0))[0]


@pytest.mark.parametrize(
    "model",
    [
        _SeenByOthers,
        _QuantisedTwice,
        _ScaleOfTheResult,
        _Permuted,
        _OldContentMatters,
        _ScaledAlready,
    ],
)
def test_attention_is_left_alone_where_its_output_is_needed_as_it_is(model: Any) -> None:
    result = run(model())
    assert "attention_quant_fusion" not in result.matches
    assert result.count(ATTENTION) == 1
