"""Putting one operator in the place of a match, where that is known to be right."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from kerf_runtime.compilation import internals
from kerf_runtime.compilation.passes.nodes import positions, same_layout, value
from kerf_runtime.compilation.passes.pattern import Match

__all__ = ["copy_origin", "fake_result", "replace_match"]


def fake_result(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    """What ``target`` would return for these nodes and constants, as fake tensors."""
    fake_args, fake_kwargs = fx.node.map_arg((args, kwargs or {}), value)
    leaves = [leaf for leaf in (*fake_args, *fake_kwargs.values()) if hasattr(leaf, "fake_mode")]
    with leaves[0].fake_mode, internals.enable_python_dispatcher():
        return target(*fake_args, **fake_kwargs)


def copy_origin(node: fx.Node, source: fx.Node) -> None:
    """Let ``node`` say that it comes from the lines of the model that ``source`` came from."""
    for name in ("stack_trace", "nn_module_stack", "source_fn_stack", "original_aten"):
        if name in source.meta:
            node.meta[name] = source.meta[name]


def replace_match(graph: fx.Graph, match: Match, op: torch._ops.OpOverload) -> bool:
    """Compute the results of ``match`` with ``op``, whose arguments have the names of the pattern.

    Returns:
        Whether it was done.  It is not if ``op`` would return other shapes, data types or strides, or if
        there is no place in the graph that comes after all inputs and before everything that needs the
        results.
    """
    by_name: dict[str, Any] = {**match.inputs, **match.numbers}
    args = tuple(by_name[argument.name] for argument in op._schema.arguments)
    fake = fake_result(op, args)
    results = fake if isinstance(fake, tuple) else (fake,)
    for node, result in zip(match.outputs, results, strict=True):
        if node is not None and not same_layout(value(node), result):
            return False
    spot = _first_place(graph, match)
    if spot is None:
        return False

    anchor = match.outputs[0]
    assert anchor is not None  # a match starts at its first result
    with graph.inserting_before(spot):
        call = graph.call_function(op, args)
        call.meta["val"] = fake
        copy_origin(call, anchor)
        for index, (node, result) in enumerate(zip(match.outputs, results, strict=True)):
            if node is None:
                continue
            new = call
            if isinstance(fake, tuple):
                new = graph.call_function(operator.getitem, (call, index))
                new.meta["val"] = result
                copy_origin(new, node)
            node.replace_all_uses_with(new)
    order = positions(graph)
    for node in sorted(match.nodes, key=order.__getitem__, reverse=True):
        graph.erase_node(node)
    return True


def _first_place(graph: fx.Graph, match: Match) -> fx.Node | None:
    """The node before which every input is there, no result is needed yet, and no memory has changed
    since the matched nodes read it; None if there is none."""
    order = positions(graph)
    nodes = match.nodes
    first = min(nodes, key=order.__getitem__)
    last_input = max(match.inputs.values(), key=order.__getitem__)
    if order[last_input] < order[first]:
        return first
    needed = min(
        order[user]
        for node in match.outputs
        if node is not None
        for user in node.users
        if user not in nodes
    )
    between = list(graph.nodes)[order[first] : order[last_input] + 1]
    if needed <= order[last_input] or any(_writes(node) for node in between):
        return None
    return last_input.next


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
