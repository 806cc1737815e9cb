"""Attention-quant fusion: attention writes FP8 itself where its result is only quantised.

The quantisation must be the static one, because the scale has to be known before attention starts, and
attention must be inside the compiled graph (it is not when the graph is split at it).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

import kerf_runtime.ops.attention  # noqa: F401  registers torch.ops.kerf.attention
from kerf_runtime.compilation.passes.fusions import static_quant_patterns
from kerf_runtime.compilation.passes.nodes import (
    auto_functionalized,
    positions,
    root_of_views,
    same_layout,
    value,
)
from kerf_runtime.compilation.passes.pattern import Match, find_match
from kerf_runtime.compilation.passes.replace import copy_origin, fake_result
from kerf_runtime.ops.fp8 import FP8

__all__ = ["fuse_attention_quant"]

_aten = torch.ops.aten
_attention = torch.ops.kerf.attention.default
_EMPTY = frozenset(
    {
        _aten.empty.memory_format,
        _aten.empty_strided.default,
        _aten.empty_permuted.default,
        _aten.empty_like.default,
        _aten.new_empty.default,
    }
)


def fuse_attention_quant(graph: fx.Graph) -> int:
    """Rewrite ``graph`` in place.

    Returns:
        How many attention calls write FP8 from now on.
    """
    if not any(node.args[:1] == (_attention,) for node in _functionalized(graph)):
        return 0
    patterns = static_quant_patterns(graph)
    matches = 0
    for node in list(graph.nodes):
        match = find_match(patterns, node) if node.users else None
        if match is not None:
            matches += _fuse(graph, match)
    return matches


def _functionalized(graph: fx.Graph) -> list[fx.Node]:
    return list(graph.find_nodes(op="call_function", target=auto_functionalized))


def _fuse(graph: fx.Graph, quant: Match) -> bool:
    """Let the attention that made the quantised tensor write it, if that is all it is for."""
    views = root_of_views(quant.inputs["x"], quant.nodes)
    if views is None or not _is_attention_output(views[0]):
        return False
    call = views[0].args[0]
    scale, order = quant.inputs["scale"], positions(graph)
    assert isinstance(call, fx.Node)
    buffers = root_of_views(call.kwargs["output"], (call,))  # type: ignore[arg-type]
    if buffers is None or buffers[0].target not in _EMPTY or order[scale] > order[call]:
        return False
    result = quant.outputs[0]
    assert result is not None  # a match starts at its first result
    if not same_layout(_as_fp8(value(quant.inputs["x"])), value(result)):
        return False

    with graph.inserting_before(call):
        buffer = _replay(graph, buffers[1:], _fp8_buffer(graph, buffers[0]))
        kwargs = {**call.kwargs, "output": buffer, "output_scale": scale}
        new = graph.call_function(auto_functionalized, call.args, kwargs)
        new.meta["val"] = (None, _as_fp8(value(buffer)))
        _update_eager_values(new, call, scale)
        copy_origin(new, call)
        output = graph.call_function(operator.getitem, (new, 1))
        output.meta["val"] = new.meta["val"][1]
    with graph.inserting_before(result):
        output = _replay(graph, views[1:], output)
    result.replace_all_uses_with(output)
    _erase(graph, [*quant.nodes, *views, call, *buffers])
    return True


def _is_attention_output(node: fx.Node) -> bool:
    """Whether ``node`` is the output buffer after a call of attention that does not quantise yet."""
    if node.target is not operator.getitem or node.args[1] != 1:
        return False
    call = node.args[0]
    return (
        isinstance(call, fx.Node)
        and call.target is auto_functionalized
        and call.args[0] is _attention
        and call.kwargs.get("output_scale") is None
        and len(call.users) == 1
    )


def _fp8_buffer(graph: fx.Graph, empty: fx.Node) -> fx.Node:
    """The same uninitialised tensor with one byte per element."""
    kwargs = {**empty.kwargs, "dtype": FP8}
    node = graph.call_function(empty.target, empty.args, kwargs)  # type: ignore[arg-type]
    copy_origin(node, empty)
    node.meta["val"] = _as_fp8(value(empty))
    return node


def _as_fp8(fake: Any) -> Tensor:
    """A fake tensor of the same shape and strides."""
    with fake.fake_mode:
        return torch.empty_strided(fake.shape, fake.stride(), dtype=FP8, device=fake.device)


def _replay(graph: fx.Graph, views: list[fx.Node], base: fx.Node) -> fx.Node:
    for view in views:
        node = graph.call_function(view.target, (base, *view.args[1:]), view.kwargs)  # type: ignore[arg-type]
        node.meta["val"] = fake_result(node.target, node.args, dict(node.kwargs))
        copy_origin(node, view)
        base = node
    return base


def _update_eager_values(new: fx.Node, call: fx.Node, scale: fx.Node) -> None:
    """Inductor constrains layouts by the values the operator was traced with."""
    if "eager_input_vals" not in call.meta:
        return
    args, kwargs = call.meta["eager_input_vals"]
    changed = {**kwargs, "output": _as_fp8(kwargs["output"]), "output_scale": value(scale)}
    new.meta["eager_input_vals"] = (args, changed)


def _erase(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    """Erase those of ``nodes`` that nothing uses any more, last first."""
    order = positions(graph)
    for node in sorted(set(nodes), key=order.__getitem__, reverse=True):
        if not node.users:
            graph.erase_node(node)
