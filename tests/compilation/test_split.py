"""Cutting a graph at the splitting ops changes nothing of what it computes."""

from __future__ import annotations

import operator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.compilation import models
from tests.compilation.graphs import (
    ATTENTION,
    as_sequence,
    plan_of_graph,
    stitch_eagerly,
    trace,
    trace_and_split,
)
from tests.compilation.helpers import run
from torch import fx

from kerf_runtime.compilation.counters import compilation_counter
from kerf_runtime.compilation.planner import build_plan
from kerf_runtime.compilation.split import resolve_splitting_ops, split_graph
from kerf_runtime.errors import CompileError, ConfigError

library = torch.library.Library("kerf_split_tests", "DEF")
library.define("fill(Tensor x, Tensor(a!) output, float scale) -> ()")
library.define("shift(Tensor x, int by) -> Tensor")
library.define("both(Tensor x, Tensor y) -> (Tensor, Tensor)")
library.define("chosen(Tensor x) -> Tensor")
library.define("chosen.other(Tensor x, Tensor y) -> Tensor")


def _fill(x, output, scale):
    output.copy_(x * scale)


library.impl("fill", _fill, "CPU")
library.impl("shift", lambda x, by: torch.roll(x, by, 0), "CPU")
library.impl("both", lambda x, y: (x + y, x - y), "CPU")
library.impl("chosen", lambda x: x + 1, "CPU")
library.impl("chosen.other", lambda x, y: x + y, "CPU")


@pytest.mark.parametrize("layers", [1, 2, 3, 12, 30])
def test_n_layers_give_n_splitting_and_n_plus_1_capturable_pieces(layers):
    with compilation_counter.expect(
        dynamo_traces=1,
        graphs_seen=1,
        pieces_seen=2 * layers + 1,
        capturable_pieces_seen=layers + 1,
    ):
        traced = trace(models.tiny(layers).model)
        split = split_graph(traced.module, resolve_splitting_ops(ATTENTION))
    assert [piece.is_splitting for piece in split.pieces] == [False, True] * layers + [False]
    assert len(split.compilable) == layers + 1


def test_a_splitting_op_is_alone_in_its_piece():
    _, split = trace_and_split(models.tiny(2).model)
    for piece in split.pieces:
        calls = [n for n in piece.module.graph.nodes if n.op == "call_function"]
        attention = [n for n in calls if "attention" in str(n.target)]
        assert len(attention) == (1 if piece.is_splitting else 0)
        assert not piece.is_splitting or calls == attention


def test_an_empty_list_of_splitting_ops_gives_one_piece():
    with compilation_counter.expect(pieces_seen=1, capturable_pieces_seen=1):
        _, split = trace_and_split(models.tiny(3).model, ())
    assert len(split.pieces) == 1
    assert not split.pieces[0].is_splitting


def test_the_traced_llama_split_and_stitched_gives_the_same_bits():
    loaded = models.llama(2)
    traced, split = trace_and_split(loaded.model)
    prints = {piece.name: piece.name for piece in split.compilable}
    plan = build_plan(traced, split, prints, ("input_ids", "positions"))
    state = {**dict(loaded.model.named_parameters()), **dict(loaded.model.named_buffers())}
    forward = stitch_eagerly(plan, split, state)
    for tokens in (1, 2, 7, 32, 50):
        assert torch.equal(run(forward, tokens), run(loaded.model, tokens))


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("kerf::attention", "kerf.attention.default"),
        ("aten::mm.out", "aten.mm.out"),
        ("kerf_split_tests::fill", "kerf_split_tests.fill.default"),
    ],
)
def test_a_splitting_op_is_found_by_name_with_or_without_overload(name, found):
    assert found in {str(op) for op in resolve_splitting_ops((name,))}


def test_a_name_without_overload_stands_for_all_of_them():
    names = {str(op) for op in resolve_splitting_ops(("kerf_split_tests::chosen",))}
    assert names == {"kerf_split_tests.chosen.default", "kerf_split_tests.chosen.other"}


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("kerf::atention", "kerf::attention"),
        ("kerf::attention.nothing", "kerf::attention"),
        ("aten::softmx", "aten::softmax"),
    ],
)
def test_an_unknown_splitting_op_names_near_matches(name, near):
    with pytest.raises(ConfigError, match=f"no operator is called '{name}'") as raised:
        resolve_splitting_ops((name,))
    assert raised.value.where == "compilation.splittingOps"
    assert near in raised.value.hint


@pytest.mark.parametrize("name", ["attention", "kerf.attention", "", "::", "a b::c", "kerf::"])
def test_a_name_in_another_form_is_an_error_that_shows_the_form(name):
    with pytest.raises(ConfigError, match=r"namespace::name|Did you mean"):
        resolve_splitting_ops((name,))


def graph_of(build):
    """A graph module with the inputs a, b, c, made by ``build(call, a, b, c) -> output``."""
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in "abc"]
    graph.output(build(lambda op, *args, **kw: graph.call_function(op, args, kw), *inputs))
    return fx.GraphModule(torch.nn.Module(), graph)


def same_bits(a, b):
    """Equal, not-a-number included."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def compare(module, ops):
    """Run a graph whole and cut: same result, same bits left in every input."""
    plan, split = plan_of_graph(module, ops)
    inputs = [torch.arange(12.0).reshape(4, 3) * scale for scale in (1.0, -0.5, 0.1)]
    whole, cut, stitched = ([t.clone() for t in inputs] for _ in range(3))
    expected = module(*whole)
    assert same_bits(split.module(*cut), expected)
    assert same_bits(stitch_eagerly(plan, split, {})(*stitched), expected)
    for wanted, first, second in zip(whole, cut, stitched, strict=True):
        assert same_bits(first, wanted)
        assert same_bits(second, wanted)
    return plan, split


aten, own = torch.ops.aten, torch.ops.kerf_split_tests

# (operator, how many tensors it takes, further arguments); every result has shape [4, 3].
STEPS = [
    (aten.add.Tensor, 2, ()),
    (aten.mul.Tensor, 2, ()),
    (aten.add_.Tensor, 2, ()),
    (aten.sub_.Tensor, 2, ()),
    (aten.copy_.default, 2, ()),
    (aten.relu.default, 1, ()),
    (aten.fill_.Scalar, 1, (0.25,)),
    (own.shift.default, 1, (1,)),
    ("out", 2, ()),
    ("fill", 2, ()),
    ("write through a view", 2, ()),
    ("write through a transposed view", 2, ()),
    ("both", 2, ()),
]
SPLITTING = [
    "aten::add_.Tensor",
    "aten::mul.Tensor",
    "aten::copy_",
    "kerf_split_tests::fill",
    "kerf_split_tests::shift",
    "kerf_split_tests::both",
]


@given(
    st.lists(
        st.tuples(st.sampled_from(STEPS), st.integers(0, 20), st.integers(0, 20)),
        min_size=1,
        max_size=14,
    ),
    st.sets(st.sampled_from(SPLITTING), max_size=4),
)
def test_random_graphs_with_writes_and_views_compute_the_same_bits_however_they_are_cut(
    steps, splitting
):
    def build(call, *inputs):
        values = list(inputs)
        for (op, count, more), *picks in steps:
            x, y = (values[pick % len(values)] for pick in picks)
            if op == "out":
                buffer = call(aten.empty_like.default, x)
                values.append(call(aten.add.out, x, y, out=buffer))
                values.append(buffer)
            elif op == "fill":
                buffer = call(aten.zeros_like.default, x)
                call(own.fill.default, y, buffer, 0.5)
                values.append(buffer)
            elif op == "write through a view":
                call(
                    aten.add_.Tensor, call(aten.select.int, x, 0, 2), call(aten.select.int, y, 0, 1)
                )
            elif op == "write through a transposed view":
                view = call(aten.slice.Tensor, call(aten.t.default, x), 0, 0, 2)
                call(aten.mul_.Scalar, view, 2.0)
            elif op == "both":
                pair = call(own.both.default, x, y)
                values += [call(operator.getitem, pair, index) for index in (1, 0)]
            else:
                values.append(call(op, *(x, y)[:count], *more))
        total = values[0]
        for value in values[1:]:
            total = call(aten.add.Tensor, total, value)
        return total

    compare(graph_of(build), tuple(sorted(splitting)))


def test_operators_with_one_several_and_no_results_can_all_be_cut_out():
    def build(call, a, b, c):
        pair = call(own.both.default, a, b)
        second = call(operator.getitem, pair, 1)  # the first result is not used
        call(own.fill.default, second, c, 0.5)
        return call(aten.add.Tensor, call(own.shift.default, c, 1), second)

    ops = ("kerf_split_tests::both", "kerf_split_tests::fill", "kerf_split_tests::shift")
    plan, split = compare(graph_of(build), ops)
    assert [step.kind for step in plan.steps] == ["op", "op", "op", "piece"]
    assert [len(step.outputs) for step in plan.steps[:3]] == [2, 0, 1]
    assert len(split.compilable) == 1


def test_indexing_the_only_result_of_a_splitting_op_is_part_of_the_next_piece():
    def build(call, a, b, c):
        row = call(operator.getitem, call(own.shift.default, a, 1), 0)
        pair = call(own.both.default, a, b)
        other = call(operator.getitem, call(operator.getitem, pair, 1), 2)
        return call(aten.add.Tensor, row, other)

    plan, split = compare(graph_of(build), ("kerf_split_tests::both", "kerf_split_tests::shift"))
    assert [step.kind for step in plan.steps] == ["op", "piece", "op", "piece"]
    for piece in split.pieces:
        calls = [node for node in piece.module.graph.nodes if node.op == "call_function"]
        assert not piece.is_splitting or len(calls) == 1 or "both" in str(calls[0].target)


def test_the_graph_may_begin_and_end_with_a_splitting_op():
    plan, _ = compare(
        graph_of(lambda call, a, b, c: call(own.shift.default, call(own.shift.default, a, 1), 2)),
        ("kerf_split_tests::shift",),
    )
    assert [step.kind for step in plan.steps] == ["op", "op"]


def test_the_overload_of_a_splitting_op_is_chosen_by_its_arguments():
    def build(call, a, b, c):
        return call(own.chosen, call(own.chosen, a), b)

    plan, _ = compare(graph_of(build), ("kerf_split_tests::chosen",))
    assert [step.target for step in plan.steps] == ["kerf_split_tests::chosen"] * 2


def test_constants_of_a_splitting_op_move_into_the_plan():
    plan, _ = compare(
        graph_of(lambda call, a, b, c: call(own.shift.default, a, 3)), ("kerf_split_tests::shift",)
    )
    assert plan.steps[0].inputs == (("value", "i0"), ("constant", 3))


def test_infinity_is_a_constant_like_any_other():
    def build(call, a, b, c):
        call(own.fill.default, a, b, float("inf"))
        return call(aten.add.Tensor, b, c)

    compare(graph_of(build), ("kerf_split_tests::fill",))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda call, a, b, c: call(aten.sum.dim_IntList, a, [0]),
            "argument of type immutable_list",
        ),
        (lambda call, a, b, c: call(own.shift.default, a, by=1), "keyword arguments"),
    ],
)
def test_a_splitting_call_that_cannot_be_stored_is_an_error(build, message):
    with pytest.raises(CompileError, match=message):
        plan_of_graph(graph_of(build), ("aten::sum", "kerf_split_tests::shift"))


def test_a_forward_that_returns_more_than_one_tensor_is_an_error():
    traced, split = trace_and_split(models.ReturnsTwo(), ())
    with pytest.raises(CompileError, match="returns 2 values; one tensor is supported"):
        build_plan(traced, split, {p.name: "" for p in split.pieces}, ("input_ids", "positions"))


def test_a_piece_gives_what_it_returns_as_a_sequence():
    assert as_sequence(lambda: None)() == ()
    assert as_sequence(lambda: 1)() == (1,)
    assert as_sequence(lambda: (1, 2))() == (1, 2)
