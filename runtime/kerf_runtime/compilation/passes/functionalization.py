"""Fix functionalization, always the last pass: operators with output arguments write in place again.

AOTAutograd makes every graph functional: ``attention(q, k, v, output!)`` becomes
``auto_functionalized(attention, output=buffer)``, which stands for a call on a *copy* of ``buffer``.
Where nothing reads the buffer's old content afterwards, the call is put back as it was, so that no KV
cache and no output buffer is copied.  Elsewhere the node stays, is counted, and Inductor decides.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from kerf_runtime.compilation.passes.nodes import (
    auto_functionalized,
    mutated_arguments,
    positions,
    storage,
)
from kerf_runtime.compilation.passes.replace import copy_origin

__all__ = ["FunctionalizationResult", "fix_functionalization"]

_aten = torch.ops.aten
_READS_NO_ELEMENTS = frozenset(
    {
        _aten.sym_size.int,
        _aten.sym_stride.int,
        _aten.sym_numel.default,
        _aten.sym_storage_offset.default,
    }
)


@dataclass(frozen=True)
class FunctionalizationResult:
    """How many calls write in place again, and how many were left functional."""

    fixed: int
    left: int


@dataclass(frozen=True)
class _Write:
    """One mutated argument of a functionalized call.

    Attributes:
        buffer: what the operator writes to.
        result: the node that stands for the buffer after the call, if anything uses it.
        epilogue: the final copy of the result back into the buffer, if it is an input of the graph.
    """

    buffer: fx.Node
    result: fx.Node | None
    epilogue: fx.Node | None


def fix_functionalization(graph: fx.Graph) -> FunctionalizationResult:
    """Rewrite ``graph`` in place; only operators of the namespace ``kerf`` are touched."""
    fixed = left = 0
    for node in list(graph.find_nodes(op="call_function", target=auto_functionalized)):
        op = node.args[0]
        if not isinstance(op, torch._ops.OpOverload) or op.namespace != "kerf":
            continue
        writes = _writes_of(graph, node, op)
        if writes is None:
            left += 1
        else:
            _write_in_place(graph, node, op, writes)
            fixed += 1
    return FunctionalizationResult(fixed, left)


def _num_results(op: torch._ops.OpOverload) -> int:
    """Results of the functionalized call before the mutated arguments; no return value is one None."""
    return max(1, len(op._schema.returns))


def _writes_of(graph: fx.Graph, call: fx.Node, op: torch._ops.OpOverload) -> list[_Write] | None:
    """The mutated arguments of ``call``, or None if one of them must not be written in place."""
    items = {user.args[1]: user for user in call.users if user.target is operator.getitem}
    if len(items) != len(call.users):
        return None
    order = positions(graph)
    writes: list[_Write] = []
    for index, name in enumerate(mutated_arguments(op), start=_num_results(op)):
        buffer = call.kwargs.get(name)
        if buffer is None:
            continue
        if not isinstance(buffer, fx.Node):
            return None
        write = _Write(buffer, items.get(index), _epilogue(buffer, items.get(index)))
        if not _may_write(graph, call, write, order):
            return None
        writes.append(write)
    if len({storage(write.buffer) for write in writes}) != len(writes):
        return None
    return writes


def _epilogue(buffer: fx.Node, result: fx.Node | None) -> fx.Node | None:
    """``copy_(buffer, result)``: how AOTAutograd says that an input of the graph was mutated."""
    for user in buffer.users:
        if user.target is _aten.copy_.default and user.args[:2] == (buffer, result):
            return user
    return None


def _may_write(graph: fx.Graph, call: fx.Node, write: _Write, order: dict[fx.Node, int]) -> bool:
    """Whether nothing notices that the buffer itself changes at ``call``."""
    memory = storage(write.buffer)
    if memory is None:
        return False
    aliases = [node for node in graph.nodes if storage(node) == memory]
    belongs_to_caller = any(node.op in ("placeholder", "get_attr") for node in aliases)
    if belongs_to_caller and write.epilogue is None:
        return False
    return not any(
        order[user] > order[call]
        and user is not write.epilogue
        and user.target not in _READS_NO_ELEMENTS
        for alias in aliases
        for user in alias.users
    )


def _write_in_place(
    graph: fx.Graph, call: fx.Node, op: torch._ops.OpOverload, writes: list[_Write]
) -> None:
    positional = [a.name for a in op._schema.arguments if not a.kwarg_only]
    named = [a.name for a in op._schema.arguments if a.kwarg_only]

    def arrange(by_name: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(by_name[n] for n in positional), {n: by_name[n] for n in named}

    results = call.meta["val"][: _num_results(op)]
    with graph.inserting_before(call):
        new = graph.call_function(op, *arrange(call.kwargs))
    new.meta["val"] = results if len(op._schema.returns) > 1 else results[0]
    if "eager_input_vals" in call.meta:
        new.meta["eager_input_vals"] = arrange(call.meta["eager_input_vals"][1])
    copy_origin(new, call)

    for write in writes:
        if write.epilogue is not None:
            graph.erase_node(write.epilogue)
        if write.result is not None:
            write.result.replace_all_uses_with(write.buffer)
            graph.erase_node(write.result)
    for item in list(call.users):  # real results of the operator
        if len(op._schema.returns) == 1:
            item.replace_all_uses_with(new)
            graph.erase_node(item)
        else:
            item.update_arg(0, new)
    graph.erase_node(call)
