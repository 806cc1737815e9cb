"""Patterns that are traced from the functions they stand for, and the search for them in a graph.

A pattern is never written by hand: its function is traced the way AOTAutograd and Inductor trace the
model (same decompositions, same clean-up), so that both end up with the same ATen operators.  It is
traced twice, with different sizes and numbers.  What is equal in both traces is part of the pattern;
what differs must be one of those sizes or numbers, becomes a variable, and is bound when matching.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from kerf_runtime.compilation import internals
from kerf_runtime.compilation.passes.nodes import known_equal, value
from kerf_runtime.errors import CompileError

__all__ = ["Example", "Match", "Pattern", "find_match"]

_aten = torch.ops.aten
_COMMUTATIVE = frozenset({_aten.add.Tensor, _aten.mul.Tensor, _aten.maximum.default})


@dataclass(frozen=True)
class Example:
    """Arguments to trace with: shapes (and data types) of the tensors, and the plain numbers."""

    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    numbers: Mapping[str, float]


@dataclass(frozen=True)
class _Variable:
    """A size or number, known by its values in the two traces."""

    first: float
    second: float


@dataclass(eq=False)
class _PatternNode:
    """A node of the pattern, with the shape of its value; an input has no target."""

    target: Any = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    shape: tuple[Any, ...] = ()
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Match:
    """Where a pattern was found.

    Attributes:
        inputs: the node of every tensor argument, by name.
        numbers: the value of every plain number, by name.
        outputs: the node of every result; None for a result that the graph does not use.
        inner: the matched nodes that are neither, which nothing else uses.  A single value (as the
            reciprocal of a scale) that something else uses too is not one of them, and stays.
    """

    inputs: dict[str, fx.Node]
    numbers: dict[str, float]
    outputs: tuple[fx.Node | None, ...]
    inner: frozenset[fx.Node]

    @property
    def nodes(self) -> frozenset[fx.Node]:
        """Everything that the pattern computes."""
        return self.inner | {node for node in self.outputs if node is not None}


@dataclass(frozen=True)
class _Bindings:
    """What has been matched so far; copied, never changed."""

    nodes: dict[_PatternNode, fx.Node]
    values: dict[_Variable, Any]


class Pattern:
    """The traced form of one function of tensors and numbers.

    Args:
        function: takes the arguments of the examples by name, returns a tensor or a tuple of them.
        first, second: the same arguments with different sizes and numbers.
        device: where the model runs.

    Raises:
        CompileError: the two traces differ in more than sizes and numbers.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        first: Example,
        second: Example,
        *,
        device: torch.device,
    ) -> None:
        graphs = [_trace(function, example, device) for example in (first, second)]
        self._inputs, self._results = _merge(graphs[0], graphs[1], first.tensors)
        self._numbers = {
            name: _Variable(number, second.numbers[name]) for name, number in first.numbers.items()
        }
        self._check_variables()
        self.anchor: Any = self._results[0].target
        """The target of the first result: the search starts at nodes that have it."""

    def _check_variables(self) -> None:
        """Every variable is a number, or a size of an input or a result: nothing can take any value.

        Sizes of results are not checked when matching: whoever replaces the match compares the results.
        """
        known = set(self._numbers.values())
        for node in (*self._inputs.values(), *self._results):
            known |= {size for size in node.shape if isinstance(size, _Variable)}
        seen: set[_PatternNode] = set()
        queue = list(self._results)
        while queue:
            node = queue.pop()
            if node in seen:
                continue
            seen.add(node)
            for leaf in _leaves((node.args, dict(node.kwargs))):
                if isinstance(leaf, _PatternNode):
                    queue.append(leaf)
                elif isinstance(leaf, _Variable) and leaf not in known:
                    raise CompileError(f"a traced pattern contains {leaf}, which is no size of it")

    def match(self, anchor: fx.Node) -> Match | None:
        """The pattern whose first result is ``anchor``, if it is there and nothing looks inside it."""
        for bindings in _match_node(self._results[0], anchor, _Bindings({}, {})):
            match = self._complete(bindings)
            if match is not None:
                return match
        return None

    def _complete(self, bindings: _Bindings) -> Match | None:
        outputs = [self._find_result(result, bindings) for result in self._results]
        inputs = {name: bindings.nodes[node] for name, node in self._inputs.items()}
        results = {node for node in outputs if node is not None}
        inner = _not_shared({*bindings.nodes.values()} - {*inputs.values()} - results, results)
        if inner is None or (inner | results) & {*inputs.values()}:
            return None
        numbers = {name: bindings.values.get(v) for name, v in self._numbers.items()}
        if not all(isinstance(number, (int, float)) for number in numbers.values()):
            return None
        return Match(
            inputs,
            {name: number for name, number in numbers.items() if number is not None},
            tuple(outputs),
            frozenset(inner),
        )

    def _find_result(self, result: _PatternNode, bindings: _Bindings) -> fx.Node | None:
        """A result that the first one does not depend on is an item of a tuple that it is an item of."""
        if result in bindings.nodes:
            return bindings.nodes[result]
        call, index = result.args
        for user in bindings.nodes[call].users:
            if user.target is operator.getitem and user.args[1] == index:
                return user
        return None


def _not_shared(inner: set[fx.Node], results: set[fx.Node]) -> set[fx.Node] | None:
    """``inner`` without single values that others use; None if others use anything larger."""
    while True:
        computed = inner | results
        shared = {node for node in inner if any(user not in computed for user in node.users)}
        if not all(_is_single_value(node) for node in shared):
            return None
        if not shared:
            return inner
        inner = inner - shared


def _is_single_value(node: fx.Node) -> bool:
    tensor = value(node)
    return isinstance(tensor, Tensor) and all(isinstance(n, int) and n == 1 for n in tensor.shape)


def find_match(patterns: Sequence[Pattern], node: fx.Node) -> Match | None:
    """The first of ``patterns`` whose first result is ``node``."""
    for pattern in patterns:
        if pattern.anchor == node.target:
            match = pattern.match(node)
            if match is not None:
                return match
    return None


def _trace(function: Callable[..., Any], example: Example, device: torch.device) -> fx.GraphModule:
    """``function`` as Inductor sees it: traced, decomposed, common parts merged, cleaned up."""
    names = tuple(example.tensors)

    def call(*tensors: Tensor) -> Any:
        result = function(**dict(zip(names, tensors, strict=True)), **example.numbers)
        return result if isinstance(result, tuple) else (result,)

    mode = internals.FakeTensorMode()
    with mode:
        fakes = [torch.empty(s, dtype=t, device=device) for s, t in example.tensors.values()]
    with mode, internals.enable_python_dispatcher(), torch.no_grad():
        make_graph = internals.make_fx(
            torch.func.functionalize(call), internals.select_decomp_table()
        )
        module: fx.GraphModule = make_graph(*fakes)
    module.graph = internals.fx_graph_cse(module.graph)
    module.graph.eliminate_dead_code()
    module.recompile()
    cleaned: fx.GraphModule = internals.joint_graph_passes(module)
    return cleaned


def _merge(
    first: fx.GraphModule, second: fx.GraphModule, tensors: Mapping[str, Any]
) -> tuple[dict[str, _PatternNode], tuple[_PatternNode, ...]]:
    """Inputs and results of the pattern that both traces are examples of."""
    pairs = list(zip(first.graph.nodes, second.graph.nodes, strict=False))
    if len(first.graph.nodes) != len(second.graph.nodes):
        raise CompileError("a pattern has another structure for other sizes")
    merged: dict[fx.Node, _PatternNode] = {}
    inputs: list[_PatternNode] = []
    results: tuple[_PatternNode, ...] = ()
    for left, right in pairs:
        if left.op != right.op or left.target != right.target:
            raise CompileError(f"a pattern has {left} for some sizes and {right} for others")
        if left.op == "placeholder":
            merged[left] = _PatternNode(shape=_merge_shapes(left, right), dtype=value(left).dtype)
            inputs.append(merged[left])
        elif left.op == "output":
            results = tuple(merged[node] for node in left.args[0])
        elif left.op == "call_function":
            merged[left] = _PatternNode(
                left.target,
                _merge_arguments(left.args, right.args, merged),
                _merge_arguments(left.kwargs, right.kwargs, merged),
                _merge_shapes(left, right),
            )
        else:
            raise CompileError(f"a pattern contains the constant {left}")
    return dict(zip(tensors, inputs, strict=True)), results


def _merge_shapes(left: fx.Node, right: fx.Node) -> tuple[Any, ...]:
    if not isinstance(value(left), Tensor):
        return ()
    shape: tuple[Any, ...] = _merge_arguments(
        tuple(value(left).shape), tuple(value(right).shape), {}
    )
    return shape


def _merge_arguments(left: Any, right: Any, merged: Mapping[fx.Node, _PatternNode]) -> Any:
    if isinstance(left, fx.Node):
        return merged[left]
    if isinstance(left, (list, tuple)):
        return tuple(_merge_arguments(a, b, merged) for a, b in zip(left, right, strict=True))
    if isinstance(left, dict):
        return {name: _merge_arguments(item, right[name], merged) for name, item in left.items()}
    if type(left) is type(right) and left == right:
        return left
    if isinstance(left, (int, float)) and isinstance(right, (int, float)):
        return _Variable(left, right)
    raise CompileError(f"a pattern contains {left} for some sizes and {right} for others")


def _leaves(item: Any) -> Iterator[Any]:
    if isinstance(item, (list, tuple)):
        for part in item:
            yield from _leaves(part)
    elif isinstance(item, dict):
        yield from _leaves(tuple(item.values()))
    else:
        yield item


def _match_node(wanted: _PatternNode, node: Any, bindings: _Bindings) -> Iterator[_Bindings]:
    """Every way in which ``node`` computes ``wanted``."""
    if not isinstance(node, fx.Node):
        return
    if wanted in bindings.nodes:
        if bindings.nodes[wanted] is node:
            yield bindings
        return
    here = _Bindings({**bindings.nodes, wanted: node}, bindings.values)
    if wanted.target is None:
        tensor = value(node)
        if isinstance(tensor, Tensor) and tensor.dtype is wanted.dtype:
            yield from _match_argument(wanted.shape, tuple(tensor.shape), here)
        return
    if node.op != "call_function" or node.target != wanted.target:
        return
    orders = [node.args]
    if node.target in _COMMUTATIVE and len(node.args) == 2:
        orders.append(node.args[::-1])
    for args in orders:
        for matched in _match_argument(wanted.args, args, here):
            yield from _match_argument(wanted.kwargs, dict(node.kwargs), matched)


def _match_argument(wanted: Any, found: Any, bindings: _Bindings) -> Iterator[_Bindings]:
    if isinstance(wanted, _PatternNode):
        yield from _match_node(wanted, found, bindings)
    elif isinstance(wanted, _Variable):
        yield from _match_variable(wanted, found, bindings)
    elif isinstance(wanted, tuple):
        if isinstance(found, (list, tuple)) and len(found) == len(wanted):
            yield from _match_all(list(zip(wanted, found, strict=True)), bindings)
    elif isinstance(wanted, dict):
        if isinstance(found, dict) and found.keys() == wanted.keys():
            yield from _match_all([(wanted[name], found[name]) for name in wanted], bindings)
    elif _same_literal(wanted, found):
        yield bindings


def _match_all(pairs: list[tuple[Any, Any]], bindings: _Bindings) -> Iterator[_Bindings]:
    if not pairs:
        yield bindings
        return
    for matched in _match_argument(*pairs[0], bindings):
        yield from _match_all(pairs[1:], matched)


def _match_variable(wanted: _Variable, found: Any, bindings: _Bindings) -> Iterator[_Bindings]:
    if wanted not in bindings.values:
        if isinstance(value(found), (int, float, torch.SymInt)):
            yield _Bindings(bindings.nodes, {**bindings.values, wanted: value(found)})
        return
    bound = bindings.values[wanted]
    if isinstance(bound, float):
        if isinstance(found, float) and found == bound:
            yield bindings
    elif known_equal(bound, found):
        yield bindings


def _same_literal(wanted: Any, found: Any) -> bool:
    if isinstance(wanted, int) and not isinstance(wanted, bool):
        return known_equal(wanted, found)
    return type(wanted) is type(found) and bool(wanted == found)
