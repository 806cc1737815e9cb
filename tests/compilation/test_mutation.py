"""Writes to parameters, buffers and attributes are found, named, and refused where they would be lost."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from tests.compilation import stateful
from tests.compilation.graphs import example_arguments
from torch import fx

from kerf_runtime.compilation.mutation import (
    StateWrite,
    bytecode_stores,
    find_state_writes,
    refuse_state_writes,
)
from kerf_runtime.compilation.trace import trace_forward
from kerf_runtime.errors import CompileError

WRITES = {
    "in place": ("self.count.add_(1)", "add_"),
    "copy": ("self.count.copy_(x[0])", "copy_"),
    "view": (".t().mul_(2)", "mul_"),
    "out": ("torch.add(self.count, 1, out=self.count)", "add"),
    "item": ("self.count[0] = 2", "setitem"),
    "custom operator": ("torch.ops.kerf.attention(", "kerf.attention"),
    "operator": ("torch.ops.aten.add_.Tensor(self.count, 1)", "aten.add_.Tensor"),
    "inplace flag": ("F.relu(self.count, inplace=True)", "relu"),
    "inplace layer": ("self.limit(self.count)", "hardtanh"),
    "batch norm": ("F.batch_norm(x, self.count", "batch_norm"),
}


@pytest.mark.parametrize("how", WRITES)
def test_a_write_to_a_buffer_is_found_with_its_module_and_line(how):
    traced = trace_forward(stateful.Stateful(how), example_arguments())
    write = traced.state_writes[0]
    line, operator = WRITES[how]
    assert write.name == "layers.1.count"
    assert write.module == "layers.1"
    assert write.how == operator
    assert line in write.stack.splitlines()[-1]
    assert traced.assignments == ()


@pytest.mark.parametrize("how", ["to a copy", "to a result", "nothing"])
def test_writes_to_what_the_forward_made_itself_are_none_of_our_business(how):
    traced = trace_forward(stateful.Stateful(how), example_arguments(), static_graphs=True)
    assert traced.state_writes == ()


@pytest.mark.parametrize("how", ["in place", "view", "custom operator"])
def test_a_write_is_an_error_with_static_graphs_that_names_buffer_module_and_line(how):
    with pytest.raises(CompileError, match=r"forward writes 'layers\.1\.count'") as raised:
        trace_forward(stateful.Stateful(how), example_arguments(), static_graphs=True)
    error = raised.value
    assert "of module 'layers.1'" in error.what
    assert "static graphs are on" in error.what
    assert WRITES[how][0] in error.what
    file, line = error.where.removeprefix("Stateful.forward: ").split(":")
    assert file == stateful.__file__
    source = ast.parse(Path(file).read_text())
    (counter,) = [n for n in source.body if getattr(n, "name", "") == "Counter"]
    assert counter.lineno < int(line) < counter.end_lineno


@pytest.mark.parametrize(
    ("how", "name", "line"),
    [
        ("attribute", "layers.1.calls", "self.calls += 1"),
        ("assigned buffer", "layers.1.count", "self.count = self.count + 1"),
        ("tensor attribute", "layers.1.last", "self.last = x + 1"),
        ("dictionary", "layers.1.seen.tokens", 'self.seen["tokens"] = 3'),
    ],
)
def test_an_assignment_that_the_graph_would_lose_is_always_an_error(how, name, line):
    with pytest.raises(CompileError, match=f"forward writes '{name}'") as raised:
        trace_forward(stateful.Stateful(how), example_arguments())
    assert "the assignment would not happen" in raised.value.what
    assert line in raised.value.what


def graph_of(target, *args, kind="call_function", **kwargs):
    """x and y are state; y is a view of x."""
    graph = fx.Graph()
    x, y, z = (graph.placeholder(name) for name in "xyz")
    x.meta["example_value"] = value = torch.zeros(4, 4)
    y.meta["example_value"] = value[0]
    z.meta["example_value"] = torch.zeros(4)
    names = {"x": x, "y": y, "z": z}

    def resolve(item):
        return [resolve(i) for i in item] if isinstance(item, list) else names.get(item, item)

    graph.create_node(
        kind, target, tuple(map(resolve, args)), {k: resolve(v) for k, v in kwargs.items()}
    )
    return graph


aten = torch.ops.aten


@pytest.mark.parametrize(
    ("graph", "written"),
    [
        (graph_of(aten.add_.Tensor, "x", "z"), ["x"]),
        (graph_of(aten.add_, "x", "z"), ["x"]),
        (graph_of(aten.add_.Tensor, "z", "x"), []),
        (graph_of(aten.add.out, "z", "z", out="x"), ["x"]),
        (graph_of(aten.add, "x", "z"), []),
        (graph_of(aten.add, "z", "z", out="x"), ["x"]),
        (graph_of(torch.add, "x", "z"), []),
        (graph_of(torch.add, "z", "z", out="y"), ["x"]),
        (graph_of(torch.sort, "z", out=["x", "z"]), ["x"]),
        (graph_of(torch._foreach_add_, ["z", "y"], 1), ["x"]),
        (graph_of("mul_", "y", 2, kind="call_method"), ["x"]),
        (graph_of("mul", "y", 2, kind="call_method"), []),
        (graph_of("__setitem__", "x", 0, 1, kind="call_method"), ["x"]),
        (graph_of("__len__", "x", kind="call_method"), []),
        (graph_of(torch.nn.functional.relu, "z", inplace=True), []),
        (graph_of(torch.nn.functional.relu, "x", inplace=False), []),
        (graph_of(torch.nn.functional.relu, input="x", inplace=True), ["x"]),
        (graph_of(torch.nn.functional.relu, "x", True), ["x"]),
        (graph_of(torch.nn.functional.dropout, "y", 0.5, True, True), ["x"]),
        (graph_of(torch.nn.functional.dropout, "x", 0.5, True), []),
        (graph_of(torch.nn.functional.batch_norm, "z", "x", "x"), []),
        (graph_of(torch.nn.functional.batch_norm, "z", "x", "x", training=True), ["x"]),
        (graph_of(torch.nn.functional.batch_norm, "z", "x", "y", None, None, True), ["x"]),
        (graph_of(torch.nn.functional.instance_norm, "z", "x", "x"), ["x"]),
        (graph_of(torch.nn.functional.embedding, "z", "x"), []),
        (graph_of(torch.nn.functional.embedding, "z", "x", max_norm=1.0), ["x"]),
        (graph_of(torch.nn.functional.embedding, "z", "x", None, 1.0), ["x"]),
    ],
    ids=lambda value: "" if isinstance(value, list) else str(list(value.nodes)[-1].format_node()),
)
def test_writes_of_every_kind_are_found_by_schema_or_by_convention(graph, written):
    state = {"x": "x", "y": "x.view"}
    assert [write.name for write in find_state_writes(graph, state)] == written


def test_a_write_that_no_node_looks_like_is_found_by_what_it_changed():
    graph = graph_of(len, "x")
    (placeholder, *_) = graph.nodes
    placeholder.meta["example_value"][0].add_(1)
    assert find_state_writes(graph, {"x": "x"}) == (StateWrite("x", "an operator", ""),)
    assert find_state_writes(graph, {"z": "z"}) == ()


def test_nothing_is_state_unless_it_is_said_to_be():
    assert find_state_writes(graph_of(aten.add_.Tensor, "x", "z"), {}) == ()


def test_stores_in_bytecode_are_named():
    def direct(model, x):
        model.count = x
        del model.old

    def through_object(model, x):
        object.__setattr__(model, "count", x)

    def into_a_dictionary(model, x):
        model._buffers.update({"count": x})

    def harmless(model, x):
        y = model._buffers["count"] + x
        return [y][0]

    assert bytecode_stores(direct.__code__) == ("count", "old")
    assert bytecode_stores(through_object.__code__) == ("count",)
    assert bytecode_stores(into_a_dictionary.__code__) == ("count",)
    assert bytecode_stores(harmless.__code__) == ()


def test_the_error_lists_the_other_writes_and_shows_the_transformed_code():
    writes = [StateWrite("count", "add_", ""), StateWrite("a.b", "mul_", "")]
    with pytest.raises(CompileError) as raised:
        refuse_state_writes(writes, where="here", why="of a reason", source="the code")
    assert raised.value.what == (
        "forward writes 'count' of the model itself with add_ (and 1 more: a.b), which is refused because "
        "of a reason\nThe transformed code:\nthe code\n"
    )
    assert raised.value.where == "here"
    refuse_state_writes([], where="here", why="of a reason")
