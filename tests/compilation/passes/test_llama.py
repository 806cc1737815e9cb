"""The passes on the real FP8 Llama: every norm, activation and attention that is quantised, once."""

from __future__ import annotations

import pytest
import torch
from tests.compilation.helpers import batch
from tests.compilation.models import fp8_llama
from tests.compilation.passes.harness import run_passes
from torch import Tensor

from kerf_runtime.config.custom_ops import resolve_custom_ops
from kerf_runtime.forward_context import ForwardContext, set_forward_context
from kerf_runtime.layers.custom_op import apply_policy


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("policy", ["all", "none"])
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_every_quantised_value_of_a_llama_is_fused(
    kind: str, policy: str, dtype: torch.dtype
) -> None:
    layers = 3
    model = fp8_llama(layers, static=kind == "static", dtype=dtype).model
    apply_policy(model, resolve_custom_ops([policy], inductor=True))
    ids, positions = batch(6)

    def forward(input_ids: Tensor, positions: Tensor) -> Tensor:
        hidden: Tensor = type(model).forward(model, input_ids, positions)
        return hidden

    with set_forward_context(ForwardContext()), torch.no_grad():
        expected = forward(ids, positions)
        result = run_passes(forward, ids, positions)
    matched = {name: n for name, n in result.matches.items() if name != "noop_elimination"}
    assert matched == {
        "norm_quant_fusion": 2
        * layers,  # before attention and before the MLP; the last is not quantised
        "activation_quant_fusion": layers,
        **({"attention_quant_fusion": layers} if kind == "static" else {}),
        "fix_functionalization": layers,
    }
    assert float((result.outputs - expected).norm() / expected.norm()) < 0.02
