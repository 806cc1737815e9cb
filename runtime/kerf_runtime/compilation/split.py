"""Cut a traced graph at the splitting ops, keeping the order of all nodes.

N calls of splitting ops give N splitting pieces, which run as they are, and N+1 compilable pieces
between them.  The order is kept because in-place writes depend on it.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

from kerf_runtime.compilation import internals
from kerf_runtime.compilation.counters import compilation_counter
from kerf_runtime.errors import ConfigError

__all__ = [
    "Piece",
    "SplitGraph",
    "check_all_called",
    "number_of_results",
    "resolve_splitting_ops",
    "split_graph",
    "split_source",
]


@dataclass(frozen=True)
class Piece:
    """One submodule of the split graph."""

    name: str
    module: fx.GraphModule
    is_splitting: bool


@dataclass(frozen=True)
class SplitGraph:
    """The graph that calls the pieces in order, and the pieces."""

    module: fx.GraphModule
    pieces: tuple[Piece, ...]

    @property
    def compilable(self) -> tuple[Piece, ...]:
        """The pieces between the splitting ops."""
        return tuple(piece for piece in self.pieces if not piece.is_splitting)


def resolve_splitting_ops(names: tuple[str, ...]) -> frozenset[torch._ops.OpOverload]:
    """The operator overloads named ``namespace::name`` or ``namespace::name.overload``.

    Raises:
        ConfigError: no such operator; lists near matches.
    """
    overloads: set[torch._ops.OpOverload] = set()
    for name in names:
        found = _find_overloads(name)
        if not found:
            known = sorted({schema.name for schema in internals.schemas()})
            near = difflib.get_close_matches(name.split(".")[0], known, n=3)
            raise ConfigError(
                f"no operator is called {name!r}",
                where="compilation.splittingOps",
                hint=f"Did you mean {', '.join(near)}?" if near else "Write it as namespace::name",
            )
        overloads |= found
    return frozenset(overloads)


def _find_overloads(name: str) -> set[torch._ops.OpOverload]:
    namespace, _, rest = name.partition("::")
    op_name, _, overload = rest.partition(".")
    if not namespace.isidentifier() or not op_name.isidentifier():
        return set()
    packet = getattr(getattr(torch.ops, namespace), op_name, None)
    if packet is None:
        return set()
    wanted = [overload] if overload else packet.overloads()
    return {getattr(packet, item) for item in wanted if item in packet.overloads()}


def _calls_splitting_op(node: fx.Node, ops: frozenset[torch._ops.OpOverload]) -> bool:
    if node.op != "call_function":
        return False
    target = node.target
    if isinstance(target, torch._ops.OpOverloadPacket):
        return any(getattr(target, overload) in ops for overload in target.overloads())
    return target in ops


def check_all_called(names: Sequence[str], graph: fx.GraphModule, model: str) -> None:
    """Refuse splitting ops at which nothing is split.

    Raises:
        ConfigError: lists them, and the operators that the graph calls by name.
    """
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]

    def is_called(name: str) -> bool:
        ops = resolve_splitting_ops((name,))
        return any(_calls_splitting_op(node, ops) for node in calls)

    missing = [name for name in names if not is_called(name)]
    if not missing:
        return
    kinds = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
    known = {str(n.target).replace(".", "::", 1) for n in calls if isinstance(n.target, kinds)}
    raise ConfigError(
        f"the forward of {model} never calls {', '.join(missing)}",
        where="compilation.splittingOps",
        hint=f"Operators that it calls by name (torch.ops.namespace.name): "
        f"{', '.join(sorted(known)) or 'none'}. An empty list splits nowhere",
    )


def number_of_results(target: Any) -> int:
    """How many values a call of an operator gives; more than one come as a tuple."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    return len(target._schema.returns)


def _is_several_results(node: object, ops: frozenset[torch._ops.OpOverload]) -> bool:
    """Whether ``node`` is a splitting call that gives a tuple; indexing any other result is computing."""
    return (
        isinstance(node, fx.Node)
        and _calls_splitting_op(node, ops)
        and number_of_results(node.target) > 1
    )


def split_graph(graph: fx.GraphModule, ops: frozenset[torch._ops.OpOverload]) -> SplitGraph:
    """Cut ``graph`` in one pass over its nodes; every splitting call gets a piece of its own."""
    piece_of: dict[fx.Node, int] = {}
    splitting: set[int] = set()
    current = 0
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.target is operator.getitem and _is_several_results(node.args[0], ops):
            piece_of[node] = piece_of[node.args[0]]  # tuples do not cross the border of a piece
        elif _calls_splitting_op(node, ops):
            current += 1
            piece_of[node] = current
            splitting.add(current)
            current += 1
        else:
            piece_of[node] = current
    module = split_module(
        graph,
        None,  # type: ignore[arg-type]  # unused by split_module
        lambda node: piece_of[node],
        keep_original_order=True,
    )
    pieces = []
    for name, child in module.named_children():
        index = int(name.removeprefix("submod_"))
        assert isinstance(child, fx.GraphModule)
        pieces.append(Piece(name, child, index in splitting))
    compilation_counter.pieces_seen += len(pieces)
    compilation_counter.capturable_pieces_seen += sum(not piece.is_splitting for piece in pieces)
    return SplitGraph(module, tuple(pieces))


def split_source(split: SplitGraph) -> str:
    """The split graph as readable Python: the calls of the pieces, then a class for each piece.

    Shapes and strides stand beside every value, the line of the model above it.
    """
    kinds = [
        f"#   {p.name}: {'splitting op' if p.is_splitting else 'compiled'}" for p in split.pieces
    ]
    code = split.module.print_readable(print_output=False, include_stride=True)
    head = ["# The graph that calls the pieces, and every piece. For people: it is not executed."]
    return "\n".join([*head, *kinds, "import torch", "", code.strip(), ""])
