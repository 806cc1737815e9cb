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
OF_ANY_GRAPH = ("unfuse_matrix_adds", "noop_elimination")
"""Passes whose matches depend on how Inductor writes the graph."""


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


class AttentionOnly(AttentionQuant):
    """Attention and quantisation, nothing behind: products would multiply what rounding changes."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.quant(self.attend(x, i), self.scale(i))[0] for i in range(self.count))


def assert_neighbours(actual: Any, expected: Any) -> None:
    """Equal, or now and then the next FP8 value: fused attention does not round to bfloat16 first."""
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype is other.dtype is torch.float8_e4m3fn
        left, right = one.float(), other.float()
        assert ((left - right).abs() <= 0.13 * right.abs() + 2**-9).all()
        assert (left != right).float().mean() < 0.15


MODELS = {
    "norm, native, dynamic": (NormQuant, ("native", quantiser("dynamic", "native"))),
    "add and norm, native, static": (AddNormQuant, ("native", quantiser("static", "native"))),
    "add and norm, custom, dynamic": (AddNormQuant, ("custom", quantiser("dynamic", "custom"))),
    "activation, native, static": (ActivationQuant, ("native", quantiser("static", "native"))),
    "activation, custom, dynamic": (ActivationQuant, ("custom", quantiser("dynamic", "custom"))),
    "attention, native, static": (AttentionOnly, (quantiser("static", "native"),)),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_is_fused_and_gives_the_results_of_the_unfused_model(name: str) -> None:
    kind, arguments = MODELS[name]
    attention = kind is AttentionOnly
    check = assert_neighbours if attention else assert_same
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
            check(compiled(x), expected)
    matched = {key: count for key, count in manager.matches.items() if key not in OF_ANY_GRAPH}
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
