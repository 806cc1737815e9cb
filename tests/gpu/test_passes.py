"""The graph passes on the GPU: through Inductor with code generation, the fused kernels give the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
if torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("FP8 needs compute capability 8.9 or newer", allow_module_level=True)

from tests.compilation.passes.attention import one_prompt
from tests.compilation.passes.harness import ALL, assert_same
from tests.compilation.passes.layers import (
    ActivationQuant,
    AddNormQuant,
    AttentionQuant,
    NormQuant,
    attention_layer_names,
    quantiser,
)
from torch import Tensor, nn
from torch._inductor import config

from kerf_runtime.compilation.passes.manager import PassManager, inductor_options

pytestmark = pytest.mark.gpu
WIDTH, COUNT = 256, 2


def tokens(rows: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(rows)
    return torch.randn(rows, WIDTH, device="cuda", dtype=torch.bfloat16, generator=generator)


@contextmanager
def batch(rows: int, *, attention: bool) -> Iterator[None]:
    layers = attention_layer_names(COUNT)
    context: Any = (
        one_prompt(rows, layers, width=WIDTH, device="cuda") if attention else nullcontext()
    )
    with context, torch.no_grad():
        yield


MODELS = {
    "norm, native, dynamic": (NormQuant, ("native", quantiser("dynamic", "native"))),
    "add and norm, native, static": (AddNormQuant, ("native", quantiser("static", "native"))),
    "add and norm, custom, dynamic": (AddNormQuant, ("custom", quantiser("dynamic", "custom"))),
    "activation, native, static": (ActivationQuant, ("native", quantiser("static", "native"))),
    "activation, custom, dynamic": (ActivationQuant, ("custom", quantiser("dynamic", "custom"))),
    "attention, native, static": (AttentionQuant, (quantiser("static", "native"),)),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_is_fused_and_gives_the_results_of_the_unfused_model(name: str) -> None:
    kind, arguments = MODELS[name]
    attention = kind is AttentionQuant
    model: nn.Module = kind(COUNT, *arguments, width=WIDTH).cuda()  # type: ignore[operator]
    manager = PassManager(ALL)
    torch._dynamo.reset()
    first = tokens(33)
    torch._dynamo.mark_dynamic(first, 0)
    compiled = torch.compile(model, fullgraph=True)
    options = {**inductor_options(manager), "fx_graph_cache": False}
    for x in (first, tokens(7), tokens(200)):
        rows = x.shape[0]
        with batch(rows, attention=attention):
            expected = model(x)
        with config.patch(options), batch(rows, attention=attention):
            assert_same(compiled(x), expected)
    matched = {key: count for key, count in manager.matches.items() if key != "noop_elimination"}
    assert matched == {
        "norm_quant_fusion": COUNT * issubclass(kind, (NormQuant, AddNormQuant)),
        "activation_quant_fusion": COUNT * issubclass(kind, ActivationQuant),
        "attention_quant_fusion": COUNT * attention,
        "fix_functionalization": COUNT * attention,
    }
    assert manager.left_functional == 0


def test_the_fused_graph_can_be_recorded_and_replayed() -> None:
    model = AddNormQuant(COUNT, "native", quantiser("static", "native"), width=WIDTH).cuda()
    manager, x = PassManager(ALL), tokens(16)
    torch._dynamo.reset()
    options = {**inductor_options(manager), "fx_graph_cache": False}
    with config.patch(options), torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, dynamic=False)
        compiled(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = compiled(x)
        x.copy_(tokens(16).flip(0))
        graph.replay()
        torch.cuda.synchronize()
        assert_same(outputs, model(x))
    assert manager.matches["norm_quant_fusion"] == COUNT
