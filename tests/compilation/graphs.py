"""Short ways to trace, split and stitch the models of ``tests.compilation.models``, without Inductor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from kerf_runtime.compilation.plan import InputRef, StitchPlan, stitch
from kerf_runtime.compilation.planner import build_plan
from kerf_runtime.compilation.split import SplitGraph, resolve_splitting_ops, split_graph
from kerf_runtime.compilation.trace import TracedGraph, trace_forward

ATTENTION = ("kerf::attention",)


def example_arguments(tokens: int = 32) -> dict[str, Tensor]:
    ids = torch.zeros(tokens, dtype=torch.int64)
    return {"input_ids": ids, "positions": torch.zeros_like(ids)}


def trace(model: nn.Module) -> TracedGraph:
    """One Dynamo trace of ``model``."""
    return trace_forward(model, example_arguments())


def trace_and_split(
    model: nn.Module, ops: tuple[str, ...] = ATTENTION
) -> tuple[TracedGraph, SplitGraph]:
    """Trace ``model`` and cut it."""
    traced = trace(model)
    return traced, split_graph(traced.module, resolve_splitting_ops(ops))


def as_sequence(piece: Callable[..., Any]) -> Callable[..., Any]:
    """A piece of a split graph, called as a compiled one is: it returns a sequence."""

    def call(*inputs: Any) -> Any:
        result = piece(*inputs)
        return () if result is None else result if isinstance(result, tuple) else (result,)

    return call


def stitch_eagerly(
    plan: StitchPlan, split: SplitGraph, state: dict[str, Tensor]
) -> Callable[..., Tensor]:
    """The stitched forward with the uncompiled pieces."""
    modules = {piece.name: piece.module for piece in split.pieces}
    pieces = {
        index: as_sequence(modules[step.name])
        for index, step in enumerate(plan.steps)
        if step.kind == "piece"
    }
    return stitch(plan, pieces, state)


def plan_of_graph(module: fx.GraphModule, ops: tuple[str, ...]) -> tuple[StitchPlan, SplitGraph]:
    """Plan of a hand-made graph whose placeholders are all arguments."""
    names = tuple(str(n.target) for n in module.graph.nodes if n.op == "placeholder")
    refs = tuple(InputRef("argument", name) for name in names)
    split = split_graph(module, resolve_splitting_ops(ops))
    fingerprints = {piece.name: piece.name for piece in split.compilable}
    return build_plan(TracedGraph(module, refs, (), ()), split, fingerprints, names), split
