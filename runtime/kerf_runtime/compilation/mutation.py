"""Find what a traced forward writes beside its results: parameters, buffers, Python attributes.

A static graph replays kernels and nothing else.  A write to a buffer would be repeated at every replay,
also of padded and warm-up batches, and an assignment to an attribute would not happen at all.  So both
are errors where static graphs are on, and assignments are errors wherever the traced graph is all that
runs (level 3).  Everything here is pure except ``refuse_state_writes``, which raises.
"""

from __future__ import annotations

import dis
import inspect
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor, fx

from kerf_runtime.errors import CompileError

__all__ = ["StateWrite", "bytecode_stores", "find_state_writes", "refuse_state_writes"]


@dataclass(frozen=True)
class StateWrite:
    """One write to something that outlives the call.

    Attributes:
        name: qualified name from the model: ``layers.0.count``.
        how: the operator or the kind of assignment.
        stack: the user's frames as text, the last of them is where it happens; empty if unknown.
        frozen: what is written is no tensor, so it is the value of the trace at every call.
    """

    name: str
    how: str
    stack: str
    frozen: bool = False

    @property
    def module(self) -> str:
        """Qualified name of the module that owns it; empty for the model itself."""
        return self.name.rpartition(".")[0]


_INPLACE_OPERATORS = frozenset(
    getattr(operator, name)
    for name in (
        *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul"),
        *("iand", "ior", "ixor", "ilshift", "irshift", "setitem", "delitem"),
    )
)


def find_state_writes(graph: fx.Graph, state: Mapping[str, str]) -> tuple[StateWrite, ...]:
    """Every node that writes to a parameter or buffer, directly or through a view, in order.

    Last come those that were written while tracing, as their counts of changes tell, by a node that does not
    look like it.

    Args:
        graph: as Dynamo traced it; its nodes carry fake tensors in ``meta['example_value']``, which
            share storages where the real ones would.
        state: name of a placeholder node -> qualified name of the parameter or buffer it stands for.
    """
    owners: dict[int, str] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and node.name in state:
            owners.setdefault(_storage(node), state[node.name])
    found = []
    for node in graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        names = dict.fromkeys(owners.get(_storage(target)) for target in _written(node))
        found += [
            StateWrite(name, _operator_name(node), _user_stack(node)) for name in names if name
        ]
    known = {write.name for write in found}
    changed = {
        name: StateWrite(name, "an operator", "")
        for node in graph.nodes
        if node.op == "placeholder" and _changes(node)
        if (name := owners.get(_storage(node))) and name not in known
    }
    return (*found, *changed.values())


def _changes(node: fx.Node) -> int:
    """How often the tensor of a node, or a view of it, was written while tracing."""
    value = node.meta.get("example_value")
    return value._version if isinstance(value, Tensor) else 0


def _storage(node: fx.Node) -> int:
    """Identity of the memory behind a node's value; 0 for what is no tensor."""
    value = node.meta.get("example_value")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else 0


def _written(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes whose tensors ``node`` writes to, by schema where there is one, else by convention."""
    if node.op == "call_function" and isinstance(
        node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
    ):
        yield from _written_by_schema(node, node.target)
        return
    name = _operator_name(node)
    if node.target in _INPLACE_OPERATORS or (name.endswith("_") and not name.endswith("__")):
        yield from _nodes(node.args[:1])
    if name in ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"):
        yield from _nodes(node.args[:1])
    yield from _nodes(node.kwargs.get("out"))
    if _arguments(node).get("inplace") is True:
        yield from _nodes(node.args[:1] or node.kwargs.get("input"))
    yield from _written_by_layers(node, name)


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Arguments by name: all, if the function is Python's, else those that were given so."""
    named = {}
    if callable(node.target):
        with suppress(TypeError, ValueError):  # it has no signature
            named = inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments
    return {**named, **node.kwargs}


def _written_by_schema(
    node: fx.Node, target: torch._ops.OpOverload | torch._ops.OpOverloadPacket
) -> Iterator[fx.Node]:
    packet = isinstance(target, torch._ops.OpOverloadPacket)
    overloads: list[torch._ops.OpOverload] = (
        [getattr(target, name) for name in target.overloads()]
        if isinstance(target, torch._ops.OpOverloadPacket)
        else [target]
    )
    for overload in overloads:
        arguments = list(overload._schema.arguments)
        # Of a packet, the overload is chosen by the arguments: an overload they do not fit is none.
        if packet and (
            len(node.args) > len(arguments)
            or not node.kwargs.keys() <= {argument.name for argument in arguments}
        ):
            continue
        for index, argument in enumerate(arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = node.args[index] if index < len(node.args) else None
                yield from _nodes(node.kwargs.get(argument.name, given))


def _written_by_layers(node: fx.Node, name: str) -> Iterator[fx.Node]:
    """Functions that update their running statistics, or their table, as a side effect."""

    def argument(index: int, keyword: str, default: Any) -> Any:
        return node.args[index] if index < len(node.args) else node.kwargs.get(keyword, default)

    if name == "batch_norm" and argument(5, "training", False) is not False:
        yield from _nodes([argument(1, "running_mean", None), argument(2, "running_var", None)])
    if name == "instance_norm" and argument(5, "use_input_stats", True) is not False:
        yield from _nodes([argument(1, "running_mean", None), argument(2, "running_var", None)])
    if name in ("embedding", "embedding_bag") and _arguments(node).get("max_norm") is not None:
        yield from _nodes(argument(1, "weight", None))


def _nodes(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _nodes(item)


def _operator_name(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(target)
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def _user_stack(node: fx.Node) -> str:
    return str(node.meta.get("stack_trace") or "")


_STORES = frozenset({"STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_SUBSCR"})
_STORING_CALLS = frozenset({"__setattr__", "object_setattr_ignore_descriptor", "update"})


def bytecode_stores(code: CodeType) -> tuple[str, ...]:
    """Names that transformed bytecode assigns outside its own variables, in order.

    Dynamo writes what a forward assigns as ``STORE_ATTR``, as a call of ``object.__setattr__`` with the
    name as a constant, or as ``dict.update`` of ``_buffers`` with the name as the key.
    """
    instructions = list(dis.get_instructions(code))
    found: list[str] = []
    for index, item in enumerate(instructions):
        if item.opname in _STORES:
            found.append(str(item.argval) if item.argval is not None else "an item")
        elif item.argval in _STORING_CALLS and item.opname.startswith("LOAD_"):
            following = instructions[index + 1 :]
            name = next((i.argval for i in following if _is_name(i)), "an attribute")
            found.append(str(name))
    return tuple(dict.fromkeys(found))


def _is_name(item: dis.Instruction) -> bool:
    return item.opname == "LOAD_CONST" and isinstance(item.argval, str)


def refuse_state_writes(
    writes: Sequence[StateWrite], *, where: str, why: str, source: str | None = None
) -> None:
    """Raise if there is any write.

    Args:
        writes: what was found.
        where: what was traced.
        why: the reason, to follow "which is refused because".
        source: transformed code for people, if there is some.

    Raises:
        CompileError: names what is written, its module and the line; shows the stack and the source.
    """
    if not writes:
        return
    first, *others = writes
    more = f" (and {len(others)} more: {', '.join(w.name for w in others)})" if others else ""
    owner = f"module {first.module!r}" if first.module else "the model itself"
    text = f"forward writes {first.name!r} of {owner} with {first.how}{more}, which is refused because {why}"
    if first.stack:
        text += f"\nIt happens here:\n{first.stack.rstrip()}\n"
    if source:
        text += f"\nThe transformed code:\n{source.rstrip()}\n"
    raise CompileError(
        text,
        where=f"{where}: {_last_line(first.stack)}" if first.stack else where,
        hint="Keep such state outside the model, in a tensor that a custom operator writes",
    )


def _last_line(stack: str) -> str:
    """``file:line`` of the innermost frame."""
    frames = [line.strip() for line in stack.splitlines() if line.strip().startswith("File ")]
    if not frames:
        return "unknown line"
    file, line, *_ = frames[-1].removeprefix("File ").split(", ")
    return f"{file.strip(chr(34))}:{line.removeprefix('line ')}"
