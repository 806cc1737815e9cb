"""An FP8 Llama is cut and compiled as an unquantised one is: first, middle and last piece."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.compilation.helpers import make_spec, open_cache, prepare, run
from tests.compilation.models import llama

from kerf_runtime.compilation.counters import compilation_counter
from kerf_runtime.layers.custom_op import CustomOp
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


@pytest.mark.parametrize(
    ("static", "policy"), [(False, ["none"]), (True, ["all", "-rotary_embedding"])], ids=str
)
def test_an_fp8_model_compiles_three_pieces_and_agrees_with_eager(
    static: bool, policy: list[str]
) -> None:
    loaded = fp8_llama(4, static=static)
    with compilation_counter.expect(
        dynamo_traces=1,
        graphs_seen=1,
        pieces_seen=9,
        capturable_pieces_seen=5,
        inductor_compilations=3,
        guards_evaluated=0,
    ):
        prepared = prepare(
            loaded, open_cache(None, f"fp8-{static}"), spec=make_spec(customOps=policy)
        )
    forms = {m.name: m.custom for m in loaded.model.modules() if isinstance(m, CustomOp)}
    assert {name for name, custom in forms.items() if custom} == (
        {"rms_norm", "fused_add_rms_norm", "silu_and_mul", "quant_fp8"} if static else set()
    )
    for tokens in (1, 7, 40):
        expected, found = run(loaded.model, tokens), run(prepared.forward, tokens)
        assert float((found - expected).norm() / expected.norm()) < 0.02
