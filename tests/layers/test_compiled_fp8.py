"""An FP8 Llama is cut and compiled as an unquantised one is: first, middle and last piece."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.compilation.helpers import open_cache, prepare, run
from tests.compilation.models import llama

from kerf_runtime.compilation.counters import compilation_counter
from kerf_runtime.layers.custom_op import apply_policy
from kerf_runtime.layers.linear import Fp8Linear
from kerf_runtime.layers.quantization import quantize_rows
from kerf_runtime.models.config import Fp8Scheme
from kerf_runtime.models.llama.model import build
from kerf_runtime.models.loader import LoadedModel

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
}


def fp8_llama(num_layers: int, *, static: bool) -> LoadedModel:
    """A Llama with random weights, its projections quantised."""
    plain = llama(num_layers, **SIZES)
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
    return LoadedModel(model.eval(), config, plain.attention_layers)


@pytest.mark.parametrize(("static", "custom"), [(False, False), (True, True)])
def test_a_model_of_12_layers_compiles_three_pieces_and_agrees_with_eager(
    static: bool, custom: bool
) -> None:
    loaded = fp8_llama(12, static=static)
    if custom:
        apply_policy(
            loaded.model,
            frozenset({"rms_norm", "fused_add_rms_norm", "silu_and_mul", "quant_fp8"}),
        )
    with compilation_counter.expect(
        dynamo_traces=1,
        graphs_seen=1,
        pieces_seen=25,
        capturable_pieces_seen=13,
        inductor_compilations=3,
        guards_evaluated=0,
    ):
        prepared = prepare(loaded, open_cache(None, f"fp8-{static}-{custom}"))
    for tokens in (1, 7, 40):
        expected, found = run(loaded.model, tokens), run(prepared.forward, tokens)
        assert float((found - expected).norm() / expected.norm()) < 0.02
