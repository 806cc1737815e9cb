"""The policy chooses the form of every layer once; both forms give the same numbers; a trace sees one."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from tests.compilation.models import llama
from torch import nn

from kerf_runtime.config.custom_ops import CUSTOM_OP_NAMES
from kerf_runtime.forward_context import ForwardContext, set_forward_context
from kerf_runtime.layers.activation import SiluAndMul
from kerf_runtime.layers.custom_op import CustomOp, apply_policy
from kerf_runtime.layers.norm import RMSNorm
from kerf_runtime.layers.quantization import DynamicQuantFP8, StaticQuantFP8
from kerf_runtime.layers.rotary import Rotate

ALL = frozenset(CUSTOM_OP_NAMES)


def kerf_calls(model: nn.Module) -> Counter[str]:
    """The custom operators in the graph of one trace of a Llama."""
    calls: Counter[str] = Counter()

    def backend(module: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        for node in module.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverloadPacket | torch._ops.OpOverload):
                name = str(node.target)
                if name.startswith("kerf."):
                    calls[name.split(".")[1]] += 1
        return module

    torch._dynamo.reset()
    ids = torch.zeros(4, dtype=torch.int64)
    with torch.no_grad(), set_forward_context(ForwardContext()):
        torch.compile(model, backend=backend, fullgraph=True)(ids, ids)
    torch._dynamo.reset()
    return calls


def test_the_policy_counts_what_it_chose() -> None:
    model = llama(3).model
    assert apply_policy(model, frozenset({"rms_norm", "silu_and_mul"})) == {
        "rms_norm": 7,
        "fused_add_rms_norm": 0,
        "rotary_embedding": 0,
        "silu_and_mul": 3,
    }
    assert sum(apply_policy(model, frozenset()).values()) == 0


def test_every_name_of_the_policy_is_a_layer_and_every_layer_has_a_name() -> None:
    parts = [RMSNorm(8, 1e-5), SiluAndMul(), Rotate(), StaticQuantFP8(), DynamicQuantFP8()]
    names = {m.name for part in parts for m in part.modules() if isinstance(m, CustomOp)}
    assert names == ALL


def test_a_model_starts_native_and_its_trace_has_no_custom_operator_but_attention() -> None:
    assert kerf_calls(llama(2).model) == {"attention": 2}


@pytest.mark.parametrize(
    ("enabled", "expected"),
    [
        (ALL, {"rms_norm": 1, "fused_add_rms_norm": 4, "silu_and_mul": 2, "rotary_embedding": 4}),
        (frozenset({"fused_add_rms_norm"}), {"fused_add_rms_norm": 4}),
        (frozenset({"rms_norm"}), {"rms_norm": 1}),
    ],
    ids=["all", "one", "another"],
)
def test_a_trace_has_the_operators_that_the_policy_enables(
    enabled: frozenset[str], expected: dict[str, int]
) -> None:
    model = llama(2).model
    apply_policy(model, enabled)
    assert kerf_calls(model) == {"attention": 2, **expected}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_both_forms_give_the_same_hidden_states(dtype: torch.dtype) -> None:
    model = llama(2, dtype=dtype).model
    ids = torch.arange(5)
    with torch.no_grad(), set_forward_context(ForwardContext()):
        native = model(ids, ids)
        apply_policy(model, ALL)
        assert torch.equal(model(ids, ids), native)


def test_a_copy_of_a_layer_has_its_own_choice() -> None:
    layer = SiluAndMul()
    other = copy.deepcopy(layer)
    other.choose(custom=True)
    assert (layer.custom, other.custom) == (False, True)
    assert layer.forward.__self__ is layer
    assert other.forward.__self__ is other
    assert "custom" in repr(other)
    assert "native" in repr(layer)


def test_the_residual_is_what_was_added() -> None:
    norm = RMSNorm(16, 1e-6)
    norm.weight.data.fill_(2.0)
    x, residual = torch.randn(3, 16), torch.randn(3, 16)
    normed, total = norm(x, residual)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed, norm(total))
    torch.testing.assert_close(normed.pow(2).mean(-1), torch.full((3,), 4.0))
