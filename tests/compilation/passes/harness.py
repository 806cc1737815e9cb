"""Runs a model through AOTAutograd and Inductor's own graph passes with ours at the end, without codegen.

What comes out is the graph that Inductor would generate code from, run as it is: seconds per test become
tenths, and the graph can be looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.virtualized import V

from kerf_runtime.compilation.passes.manager import PassManager, inductor_options
from kerf_runtime.config.passes import PassConfig

ALL = PassConfig(norm_quant_fusion=True, activation_quant_fusion=True, attention_quant_fusion=True)
"""Everything that can be on."""


class _Twice(CustomGraphPass):
    """Runs a manager, then another one that must find nothing left to do."""

    def __init__(self, manager: PassManager, passes: PassConfig) -> None:
        self.manager, self.passes = manager, passes

    def __call__(self, graph: fx.Graph) -> None:
        self.manager(graph)
        before = str(graph)
        again = PassManager(self.passes)
        again(graph)
        assert sum(again.matches.values()) == 0, again.matches
        assert str(graph) == before

    def uuid(self) -> str:
        return self.manager.uuid()


@dataclass(frozen=True)
class Result:
    """The manager after the run, the final graph, and what it returned."""

    manager: PassManager
    graph: fx.Graph
    outputs: Any

    @property
    def matches(self) -> dict[str, int]:
        """Only the passes that matched something."""
        return {name: count for name, count in self.manager.matches.items() if count}

    def count(self, *targets: Any) -> int:
        """How many nodes call one of ``targets``."""
        return sum(node.target in targets for node in self.graph.nodes)


def run_passes(
    model: nn.Module | Callable[..., Any],
    *arguments: Tensor,
    passes: PassConfig = ALL,
    static: bool = False,
    **manager_options: Any,
) -> Result:
    """Compile ``model`` for a symbolic first dimension of every argument and run it on them.

    Also checks that running the passes a second time changes nothing.
    """
    manager = PassManager(passes, **manager_options)
    graphs: list[fx.GraphModule] = []

    def without_codegen(module: fx.GraphModule, values: Sequence[Any], **_: Any) -> Any:
        fake = torch._guards.detect_fake_mode(values)
        with V.set_fake_mode(fake):
            post_grad_passes(module, is_inference=True)
        graphs.append(module)
        return module.forward

    def backend(module: fx.GraphModule, values: Sequence[Any]) -> Any:
        return compile_fx(module, list(values), inner_compile=without_codegen)

    options = {
        **inductor_options(manager),
        "post_grad_custom_post_pass": _Twice(manager, passes),
        "fx_graph_cache": False,
    }
    torch._dynamo.reset()
    if not static:
        for argument in arguments:
            torch._dynamo.mark_dynamic(argument, 0)
    with config.patch(options), torch.no_grad():
        compiled = torch.compile(
            model, backend=backend, fullgraph=True, dynamic=False if static else None
        )
        outputs = compiled(*arguments)
    (module,) = graphs
    return Result(manager, module.graph, outputs)


def assert_same(actual: Any, expected: Any) -> None:
    """Equal but for the order of additions, which may move an FP8 value to its neighbour."""
    for one, other in zip(_tensors(actual), _tensors(expected), strict=True):
        assert one.dtype is other.dtype
        assert one.shape == other.shape
        left, right = one.float(), other.float()
        spread = right.abs().max().clamp(min=1e-6)
        assert (left - right).abs().max() <= 0.07 * spread
        assert ((left - right).abs() > 0.01 * spread).float().mean() < 0.02


def _tensors(value: Any) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value)
