"""Makes the stitching plan of a split graph: what a cold start does once and a warm start reads from the cache."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from kerf_runtime.compilation.plan import PlanStep, StitchPlan
from kerf_runtime.compilation.split import Piece, SplitGraph, number_of_results
from kerf_runtime.compilation.trace import TracedGraph
from kerf_runtime.errors import CompileError

__all__ = ["build_plan"]


def build_plan(
    traced: TracedGraph,
    split: SplitGraph,
    fingerprints: Mapping[str, str],
    arguments: tuple[str, ...],
) -> StitchPlan:
    """The plan of a split graph.

    Args:
        traced: names the graph inputs.
        split: the pieces and the graph that calls them.
        fingerprints: name of a compilable piece -> fingerprint.
        arguments: argument names of the forward, in order.

    Raises:
        CompileError: the forward returns something else than one tensor.
    """
    pieces = {piece.name: piece for piece in split.pieces}
    values: dict[fx.Node, str] = {}
    steps: list[PlanStep] = []
    placeholders = [node for node in split.module.graph.nodes if node.op == "placeholder"]
    inputs = []
    for index, (node, ref) in enumerate(zip(placeholders, traced.inputs, strict=True)):
        values[node] = f"i{index}"
        inputs.append((f"i{index}", ref))

    counter = itertools.count()

    def fresh() -> str:
        return f"v{next(counter)}"

    result = ""
    for node in split.module.graph.nodes:
        if node.op == "call_module":
            piece = pieces[str(node.target)]
            refs = [("value", values[arg]) for arg in node.args]
            if piece.is_splitting:
                step, names = _op_step(piece, refs, fresh)
            else:
                names = [fresh() for _ in _returned(piece.module)]
                target = fingerprints[piece.name]
                step = PlanStep("piece", piece.name, target, tuple(refs), tuple(names))
            steps.append(step)
            values.update(_bind(node, piece.module, names))
        elif node.op == "output":
            returned = node.args[0]
            returned = returned if isinstance(returned, (tuple, list)) else (returned,)
            if len(returned) != 1 or not isinstance(returned[0], fx.Node):
                raise CompileError(
                    f"the forward returns {len(returned)} values; one tensor is supported",
                    hint="A tensor assigned to an attribute of the model in forward is returned as well",
                )
            result = values[returned[0]]
        elif node.op == "call_function" and node.target is not operator.getitem:
            raise CompileError(f"unexpected call of {node.target} between the pieces")
    writes = tuple(dict.fromkeys(write.name for write in traced.state_writes))
    return StitchPlan(arguments, tuple(inputs), tuple(steps), result, traced.absent, writes)


def _output_of(piece: fx.GraphModule) -> Any:
    return next(node for node in piece.graph.nodes if node.op == "output").args[0]


def _returned(piece: fx.GraphModule) -> list[fx.Node]:
    """The nodes of a piece whose values leave it."""
    returned = _output_of(piece)
    if returned is None:
        return []
    return list(returned) if isinstance(returned, (tuple, list)) else [returned]


def _bind(call: fx.Node, piece: fx.GraphModule, names: list[str]) -> dict[fx.Node, str]:
    """Which node of the parent graph stands for each output of a piece: a getitem, or the call."""
    if not isinstance(_output_of(piece), (tuple, list)):
        return dict.fromkeys([call], names[0]) if names else {}
    return {user: names[operator.index(user.args[1])] for user in call.users}  # type: ignore[arg-type]


def _op_step(
    piece: Piece, refs: list[tuple[str, str]], fresh: Callable[[], str]
) -> tuple[PlanStep, list[str]]:
    """A splitting piece is exactly one operator call; its constants move into the plan.

    Returns:
        The step, with one output for every value the operator returns, and the names of the piece's
        own outputs among them.
    """
    nodes = [n for n in piece.module.graph.nodes if n.op not in ("placeholder", "output")]
    placeholders = [n for n in piece.module.graph.nodes if n.op == "placeholder"]
    call, *items = nodes
    if call.op != "call_function" or any(item.target is not operator.getitem for item in items):
        raise CompileError(f"splitting piece {piece.name} is not a single operator call")
    by_node: dict[fx.Node, tuple[str, Any]] = dict(zip(placeholders, refs, strict=True))

    def describe(arg: Any) -> tuple[str, Any]:
        if isinstance(arg, fx.Node):
            return by_node[arg]
        if arg is None or isinstance(arg, (bool, int, float, str)):
            return ("constant", arg)
        raise CompileError(
            f"splitting op {call.target} has an argument of type {type(arg).__name__}, which cannot be stored"
        )

    if call.kwargs:
        raise CompileError(f"splitting op {call.target} is called with keyword arguments")
    outputs = tuple(fresh() for _ in range(number_of_results(call.target)))
    names = {item: outputs[item.args[1]] for item in items}
    if len(outputs) == 1:
        names[call] = outputs[0]
    inputs = tuple(describe(a) for a in call.args)
    step = PlanStep("op", piece.name, _qualified(call.target), inputs, outputs)
    return step, [names[node] for node in _returned(piece.module)]


def _qualified(target: Any) -> str:
    """``namespace::name.overload``; without the overload where the arguments choose it."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        if len(target.overloads()) > 1:
            return str(target._qualified_op_name)
        target = getattr(target, target.overloads()[0])
    return f"{target._schema.name}.{target._overloadname}"
