"""An FP8 Llama is cut and compiled as an unquantised one is: first, middle and last piece."""

from __future__ import annotations

import pytest
from tests.compilation.helpers import make_spec, open_cache, prepare, run
from tests.compilation.models import fp8_llama

from kerf_runtime.compilation.counters import compilation_counter
from kerf_runtime.layers.custom_op import CustomOp

pytestmark = pytest.mark.slow


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
