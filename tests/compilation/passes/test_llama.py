"""The passes on the real FP8 Llama: every norm, activation and attention that is quantised, once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.compilation.helpers import batch
from tests.compilation.models import llama
from tests.compilation.passes.harness import run_passes
from torch import Tensor, nn

from kerf_runtime.config.custom_ops import resolve_custom_ops
from kerf_runtime.forward_context import ForwardContext, set_forward_context
from kerf_runtime.layers.custom_op import apply_policy
from kerf_runtime.layers.linear import Fp8Linear
from kerf_runtime.layers.quantization import quantize_rows
from kerf_runtime.models.config import Fp8Scheme
from kerf_runtime.models.llama.model import build

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
}


def fp8_llama(num_layers: int, *, static: bool, dtype: torch.dtype) -> nn.Module:
    """A Llama with random weights, its projections quantised."""
    plain = llama(num_layers, dtype=dtype, **SIZES)
    config = replace(plain.config, quantization=Fp8Scheme(static=static, stored=True))
    model = build(config)
    modules = dict(model.named_modules())
    for name, parameter in plain.model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        module = modules[owner]
        if isinstance(module, Fp8Linear):
            module.weight.data, module.weight_scale.data = quantize_rows(parameter.data)
            if module.input_scale is not None:
                module.input_scale.data.fill_(0.02)
        else:
            setattr(module, leaf, parameter)
    model.rotary = plain.model.rotary
    return model.eval()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("policy", ["all", "none"])
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_every_quantised_value_of_a_llama_is_fused(
    kind: str, policy: str, dtype: torch.dtype
) -> None:
    layers = 3
    model = fp8_llama(layers, static=kind == "static", dtype=dtype)
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
