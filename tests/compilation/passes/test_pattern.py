"""Traced patterns: what differs between two traces must be a size or a number, and is bound."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from kerf_runtime.compilation.passes.pattern import Example, Match, Pattern, find_match
from kerf_runtime.errors import CompileError

aten = torch.ops.aten
CPU = torch.device("cpu")


def example(rows: int, columns: int, **numbers: float) -> Example:
    return Example({"x": ((rows, columns), torch.float32)}, numbers)


def pattern_of(function: Any, first: Example, second: Example) -> Pattern:
    return Pattern(function, first, second, device=CPU)


def graph_of(function: Any, *shape: int) -> fx.Graph:
    return make_fx(function, tracing_mode="fake")(torch.ones(*shape)).graph


def matches(pattern: Pattern, graph: fx.Graph) -> list[Match]:
    found = (find_match([pattern], node) for node in graph.nodes)
    return [match for match in found if match is not None]


def plus_sin(x: Tensor, amount: float) -> Tensor:
    return aten.add.Tensor(torch.sin(x), amount)


PLUS_SIN = pattern_of(plus_sin, example(3, 5, amount=0.1), example(7, 11, amount=0.2))


def test_a_number_is_bound_to_what_the_graph_has() -> None:
    (match,) = matches(PLUS_SIN, graph_of(lambda x: (x.cos().sin() + 0.75) * 2, 4, 4))
    assert match.numbers == {"amount": 0.75}
    assert match.inputs["x"].target is aten.cos.default
    assert [node.target for node in match.inner] == [aten.sin.default]


def test_a_number_that_is_computed_is_no_number() -> None:
    assert matches(PLUS_SIN, graph_of(lambda x: x.sin() + x.cos(), 4, 4)) == []


def test_an_inner_value_that_is_used_elsewhere_is_no_match() -> None:
    def function(x: Tensor) -> Any:
        inner = x.sin()
        return inner + 0.5, inner * 3

    assert matches(PLUS_SIN, graph_of(function, 4, 4)) == []


def test_an_inner_value_that_is_returned_is_no_match() -> None:
    def function(x: Tensor) -> Any:
        inner = x.sin()
        return inner + 0.5, inner

    assert matches(PLUS_SIN, graph_of(function, 4, 4)) == []


def test_another_data_type_is_no_match() -> None:
    graph = graph_of(lambda x: x.double().sin() + 0.5, 4, 4)
    assert matches(PLUS_SIN, graph) == []


def test_another_number_of_dimensions_is_no_match() -> None:
    assert matches(PLUS_SIN, graph_of(lambda x: x.sin() + 0.5, 4, 4, 4)) == []


def test_the_same_input_twice_must_be_the_same_node() -> None:
    pattern = pattern_of(lambda x: x.sin() * x.cos(), example(3, 5), example(7, 11))
    assert len(matches(pattern, graph_of(lambda x: x.cos() * x.sin(), 4, 4))) == 1
    assert matches(pattern, graph_of(lambda x: x.sin() * (x + 1).cos(), 4, 4)) == []


def test_equal_sizes_in_the_pattern_must_be_equal_in_the_graph() -> None:
    def product(x: Tensor) -> Tensor:
        return aten.view.default(x.sin(), [x.shape[1], x.shape[0]])

    pattern = pattern_of(product, example(3, 5), example(7, 11))
    assert len(matches(pattern, graph_of(lambda x: x.sin().view(6, 4), 4, 6))) == 1
    assert matches(pattern, graph_of(lambda x: x.sin().view(8, 3), 4, 6)) == []


def test_a_size_that_could_take_any_value_is_refused() -> None:
    with pytest.raises(CompileError, match="no size of it"):
        pattern_of(lambda x: x.sin()[:, : x.shape[1] // 2].sum(), example(3, 10), example(7, 22))


def test_a_function_with_another_structure_for_other_sizes_is_refused() -> None:
    with pytest.raises(CompileError, match="some sizes"):
        pattern_of(lambda x: x.sin() if x.shape[0] > 5 else x.cos(), example(3, 5), example(7, 11))
