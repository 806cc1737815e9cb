"""The emulated static graph keeps the contract of a real one."""

from __future__ import annotations

import operator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from kerf_runtime.cudagraph.emulated import EmulatedStaticGraph, record_opaque_call
from kerf_runtime.errors import CaptureError
from kerf_runtime.forward_context import (
    ForwardContext,
    get_forward_context,
    set_forward_context,
)

library = torch.library.Library("kerf_graph_tests", "DEF")
library.define("write_and_return(Tensor x, Tensor(a!) total) -> Tensor")
library.define("note_context(Tensor(a!) x) -> ()")
seen_contexts = []


def _write_and_return(x, total):
    total.add_(x.sum())
    return x * 2


library.impl("write_and_return", _write_and_return, "CPU")
library.impl("note_context", lambda x: seen_contexts.append(get_forward_context()), "CPU")


@pytest.fixture(autouse=True, params=[True, False], ids=["inference_mode", "no_grad"])
def without_gradients(request):
    with torch.inference_mode() if request.param else torch.no_grad():
        yield


def capture(function, *inputs):
    graph = EmulatedStaticGraph()
    with set_forward_context(ForwardContext()):
        output = graph.capture(function, inputs)
    return graph, output


def replayed(function, x, *values):
    """``function`` captured with ``x`` as it is, then replayed for each value written into ``x``."""
    graph, _ = capture(function, x)
    results = []
    for value in values:
        x.copy_(value)
        results.append(graph.replay().clone())
    return results


class CountingModel(nn.Module):
    """Counts how often its Python code runs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return torch.relu(self.linear(x)) + 1


def test_a_replay_never_runs_the_models_python_code_and_computes_what_it_would():
    model = CountingModel()
    x = torch.randn(3, 4)
    graph, first = capture(model, x)
    assert torch.equal(first, model.linear(x).relu() + 1)
    values = [torch.randn(3, 4) for _ in range(3)]
    for value in values:
        x.copy_(value)
        assert torch.equal(graph.replay(), model.linear(value).relu() + 1)
    assert model.calls == 1


def test_a_replay_reads_the_captured_addresses_and_fills_one_buffer():
    x = torch.ones(3)
    graph, output = capture(lambda t: t * 2, x)
    address = output.data_ptr()
    x.fill_(5)
    again = graph.replay()
    assert again is output
    assert again.data_ptr() == address
    assert again.tolist() == [10, 10, 10]


def test_parameters_changed_in_place_are_seen_by_the_next_replay():
    model = CountingModel()
    x = torch.randn(3, 4)
    graph, _ = capture(model, x)
    model.linear.weight.data.zero_()
    model.linear.bias.data.fill_(3)
    assert graph.replay().unique().tolist() == [4]


def in_place(x):
    y = x + 1
    y.mul_(2)
    y[0].sub_(5)
    y.view(-1)[1:3].copy_(x.view(-1)[:2])
    return y


def out_variant(x):
    buffer = torch.empty_like(x)
    torch.add(x, 10, out=buffer)
    result = torch.zeros_like(x)
    torch.mul(buffer, x, out=result)
    return result


def views(x):
    a, b = x.chunk(2, dim=-1)
    c = x.transpose(0, 1).reshape(-1)[: a.numel()].view_as(a)
    return torch.cat([a + b, c.contiguous(), x.t().t().narrow(1, 0, 2)], dim=-1)


def constants(x):
    return x * torch.tensor([1.0, 2.0, 3.0, 4.0]) + torch.arange(4) + torch.ones(4)


def indexed(x):
    picked = x[torch.tensor([1, 0])]
    picked[:, 2] = x[0, 3]
    return picked.softmax(-1)


def writes_its_input(x):
    y = x.clone()
    z = y[:, 1:]
    z += y[:, :-1].clone()
    return y + z.sum()


@pytest.mark.parametrize(
    "function", [in_place, out_variant, views, constants, indexed, writes_its_input]
)
def test_every_kind_of_operator_replays_as_it_runs(function):
    values = [torch.randn(2, 4) for _ in range(3)]
    expected = [function(value.clone()) for value in values]
    results = replayed(function, torch.randn(2, 4), *values)
    for result, wanted in zip(results, expected, strict=True):
        assert torch.equal(result, wanted)


def test_an_operator_that_writes_in_place_and_returns_something_new_replays_both():
    total = torch.zeros(())

    def function(x):
        return torch.ops.kerf_graph_tests.write_and_return(x, total) + 1

    x = torch.ones(3)
    graph, output = capture(function, x)
    x.fill_(10)
    graph.replay()
    assert output.tolist() == [21, 21, 21]
    assert total.item() == 33


OPERATIONS = [
    lambda a, b: a + b,
    lambda a, b: a.add_(b),
    lambda a, b: torch.sub(a, b, out=torch.empty_like(a)),
    lambda a, b: a.view(2, 3, 1)[0].mul_(2),
    lambda a, b: a.t().contiguous().t(),
    lambda a, b: b.copy_(a),
    lambda a, b: torch.maximum(a, b).clone(),
    lambda a, b: a[:, :1] - b,
]


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_random_programs_of_views_and_writes_replay_as_they_run(steps):
    def function(x):
        values = [x * 1, x + 1]
        for operation, left, right in steps:
            a, b = values[left % len(values)], values[right % len(values)]
            result = OPERATIONS[operation](a, b)
            if result.shape == x.shape:
                values.append(result)
        return torch.stack([value.reshape(x.shape) for value in values])

    inputs = [torch.arange(6.0).reshape(2, 3) + shift for shift in (3, -1)]
    expected = [function(value.clone()) for value in inputs]
    results = replayed(function, torch.zeros(2, 3), *inputs)
    for result, wanted in zip(results, expected, strict=True):
        assert torch.equal(result, wanted)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * x.sum().item(),
        lambda x: x if bool((x > 0).all()) else -x,
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x * float(x[0, 0]),
        lambda x: x[x > 0],
        lambda x: x.clone().index_put_((x > 0,), torch.tensor(1.0)),
        lambda x: x.nonzero(),
        lambda x: torch.where(x > 0)[0],
        lambda x: torch.masked_select(x, x > 0),
        lambda x: x.unique(),
        lambda x: x if torch.equal(x, x) else -x,
        lambda x: x * x.tolist()[0][0],
        lambda x: x * float(x.numpy().sum()),
        lambda x: x * torch.tensor([1.0, [x[0, 0]][0], 2.0]),
        lambda x: x.repeat_interleave(torch.tensor([1, 2]), 0),
    ],
    ids=[
        "item",
        "bool",
        "if",
        "float",
        "mask",
        "mask_put",
        "nonzero",
        "where",
        "masked_select",
        "unique",
        "equal",
        "tolist",
        "numpy",
        "tensor",
        "repeat_interleave",
    ],
)
def test_waiting_for_a_value_is_an_error_that_names_the_line(function):
    with pytest.raises(CaptureError, match="waits for a value during capture") as raised:
        capture(function, torch.ones(2, 3))
    assert f"{__file__}:" in raised.value.where
    assert "Remove" in raised.value.hint


def test_changing_a_shape_in_place_is_an_error_that_names_the_line():
    with pytest.raises(CaptureError, match="changes the shape of a tensor in place") as raised:
        capture(lambda x: (x + 1).t_(), torch.ones(2, 3))
    assert f"{__file__}:" in raised.value.where


def test_an_opaque_call_is_one_node_whatever_it_does_inside():
    calls = []

    def compiled(args):
        calls.append(len(args))
        (x,) = args
        args.clear()
        y = x + 1
        return [y * 2, y.relu()]

    x = torch.zeros(3)
    graph, output = capture(lambda t: operator.add(*record_opaque_call(compiled, [t])), x)
    assert graph.nodes == 2
    x.fill_(4)
    assert graph.replay().tolist() == [15, 15, 15]
    assert output.tolist() == [15, 15, 15]
    assert calls == [1, 1]


def test_an_opaque_call_that_returns_its_input_stays_correct():
    x = torch.zeros(3)
    graph, _ = capture(lambda t: record_opaque_call(lambda a: [a[0].add_(1)], [t])[0] * 2, x)
    x.fill_(4)
    assert graph.replay().tolist() == [10, 10, 10]
    assert x.tolist() == [5, 5, 5]


def test_outside_a_capture_an_opaque_call_is_a_plain_call():
    assert record_opaque_call(lambda args: [args[0] + 1], [1]) == [2]


def test_nodes_and_bytes_are_those_of_the_recorded_calls():
    def function(x):
        a = x + 1
        b = a.view(-1)
        scratch = torch.empty(7, dtype=torch.float64)
        torch.add(b[:7], 1, out=scratch)
        return b * 2

    graph, _ = capture(function, torch.zeros(4, 2))
    assert graph.nodes == 3
    assert graph.memory_bytes == 8 * 4 + 7 * 8 + 8 * 4


def test_a_new_graph_has_no_nodes_and_cannot_be_replayed():
    graph = EmulatedStaticGraph()
    assert (graph.nodes, graph.memory_bytes) == (0, 0)
    with pytest.raises(CaptureError, match="never captured"):
        graph.replay()


def test_captures_do_not_nest():
    def outer(x):
        return EmulatedStaticGraph().capture(lambda t: t + 1, [x])

    with pytest.raises(CaptureError, match="already running"):
        capture(outer, torch.zeros(1))


def test_after_a_failed_capture_the_next_one_works():
    with pytest.raises(CaptureError):
        capture(lambda x: x.sum().item(), torch.ones(2))
    graph, _ = capture(lambda x: x + 1, torch.ones(2))
    assert graph.nodes == 1


def test_a_replay_runs_in_the_context_of_its_capture():
    graph = EmulatedStaticGraph()
    captured, other = ForwardContext(), ForwardContext()
    with set_forward_context(captured):
        graph.capture(torch.ops.kerf_graph_tests.note_context, [torch.zeros(1)])
    seen_contexts.clear()
    with set_forward_context(other):
        graph.replay()
        assert get_forward_context() is other
    assert seen_contexts == [captured]
    assert seen_contexts[0] is captured
