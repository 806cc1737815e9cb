"""The wrapper captures once, replays afterwards, and refuses what a real graph could not do."""

from __future__ import annotations

import pytest
import torch

from kerf_runtime.compilation.counters import compilation_counter
from kerf_runtime.config import CUDAGraphMode
from kerf_runtime.cudagraph.descriptor import BatchDescriptor
from kerf_runtime.cudagraph.emulated import EmulatedStaticGraph
from kerf_runtime.cudagraph.wrapper import CaptureGate, CUDAGraphWrapper
from kerf_runtime.errors import CaptureError
from kerf_runtime.forward_context import ForwardContext, set_forward_context

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
FOUR, EIGHT = BatchDescriptor(4), BatchDescriptor(8)


class Counting:
    """A runnable that counts its calls."""

    def __init__(self, function):
        self.function = function
        self.calls = 0

    def __call__(self, *inputs):
        self.calls += 1
        return self.function(*inputs)


@pytest.fixture
def gate():
    return CaptureGate(open=True)


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


def wrap(runnable, mode, gate, **options):
    return CUDAGraphWrapper(runnable, mode, EmulatedStaticGraph, gate, **options)


def run(wrapper, mode, descriptor, *inputs):
    with set_forward_context(ForwardContext(mode=mode, descriptor=descriptor)):
        return wrapper(*inputs)


def test_the_first_run_of_a_descriptor_captures_and_later_ones_replay(gate):
    runnable = Counting(lambda x: x + 1)
    wrapper = wrap(runnable, FULL, gate)
    x = torch.zeros(4)
    with compilation_counter.expect(graphs_captured=1, graph_replays=0):
        first = run(wrapper, FULL, FOUR, x)
    gate.open = False
    with compilation_counter.expect(graphs_captured=0, graph_replays=2):
        x.fill_(1)
        assert run(wrapper, FULL, FOUR, x).tolist() == [2] * 4
        assert run(wrapper, FULL, FOUR, x) is first
    assert runnable.calls == 1
    assert wrapper.captured[FOUR].hits == 2
    assert wrapper.captured[FOUR].seconds >= 0


@pytest.mark.parametrize(
    ("wrapper_mode", "mode", "descriptor"),
    [(FULL, PIECEWISE, FOUR), (PIECEWISE, FULL, FOUR), (FULL, NONE, FOUR), (FULL, FULL, None)],
)
def test_any_other_mode_passes_through(gate, wrapper_mode, mode, descriptor):
    runnable = Counting(lambda x: x + 1)
    wrapper = wrap(runnable, wrapper_mode, gate)
    with compilation_counter.expect(graphs_captured=0, graph_replays=0):
        for _ in range(3):
            run(wrapper, mode, descriptor, torch.zeros(4))
    assert runnable.calls == 3
    assert wrapper.captured == {}


def test_descriptors_of_one_size_and_different_kind_have_graphs_of_their_own(gate):
    wrapper = wrap(lambda x: x + 1, FULL, gate)
    x = torch.zeros(4)
    outputs = [run(wrapper, FULL, BatchDescriptor(4, uniform), x) for uniform in (True, False)]
    assert len(wrapper.captured) == 2
    assert outputs[0].data_ptr() != outputs[1].data_ptr()


def test_a_capture_after_startup_is_an_error_and_counted(gate):
    wrapper = wrap(lambda x: x + 1, FULL, gate)
    gate.open = False
    with (
        compilation_counter.expect(captures_after_startup=1, graphs_captured=0),
        pytest.raises(CaptureError, match="after start-up") as raised,
    ):
        run(wrapper, FULL, EIGHT, torch.zeros(8))
    assert "num_tokens=8" in raised.value.what
    assert "FULL" in raised.value.where


def test_an_input_that_moved_is_an_error_that_names_it(gate):
    wrapper = wrap(lambda x, n, y: x + y, PIECEWISE, gate)
    x, y = torch.zeros(4), torch.zeros(4)
    run(wrapper, PIECEWISE, FOUR, x, 4, y)
    with (
        compilation_counter.expect(graph_replays=0),
        pytest.raises(CaptureError, match=r"inputs \[2\] moved .* stale memory") as raised,
    ):
        run(wrapper, PIECEWISE, FOUR, x, 4, torch.zeros(4))
    assert "persistent buffers" in raised.value.hint
    assert run(wrapper, PIECEWISE, FOUR, x, 4, y).tolist() == [0] * 4


def test_another_number_of_inputs_is_an_error(gate):
    wrapper = wrap(lambda *xs: sum(xs), FULL, gate)
    x = torch.zeros(4)
    run(wrapper, FULL, FOUR, x, x)
    with pytest.raises(CaptureError, match="captured with 2 inputs and is called with 1"):
        run(wrapper, FULL, FOUR, x)


def test_without_the_check_the_captured_address_is_read_as_a_real_graph_would(gate):
    wrapper = wrap(lambda x: x + 1, FULL, gate, check_addresses=False)
    run(wrapper, FULL, FOUR, torch.zeros(4))
    assert run(wrapper, FULL, FOUR, torch.ones(4)).tolist() == [1] * 4


def test_full_and_piecewise_wrappers_nest_in_one_call_chain(gate):
    pieces = [Counting(lambda x: x + 1), Counting(lambda x: x * 2)]
    wrapped = [wrap(piece, PIECEWISE, gate) for piece in pieces]
    forward = Counting(lambda x: wrapped[1](wrapped[0](x)))
    whole = wrap(forward, FULL, gate)
    x = torch.zeros(4)
    for mode in (PIECEWISE, FULL):
        run(whole, mode, FOUR, x)
    gate.open = False
    counts = [c.calls for c in (*pieces, forward)]
    x.fill_(3)
    with compilation_counter.expect(graph_replays=2):
        assert run(whole, PIECEWISE, FOUR, x).tolist() == [8] * 4
    assert [c.calls for c in (*pieces, forward)] == [counts[0], counts[1], counts[2] + 1]
    with compilation_counter.expect(graph_replays=1):
        assert run(whole, FULL, FOUR, x).tolist() == [8] * 4
    assert [c.calls for c in (*pieces, forward)] == [counts[0], counts[1], counts[2] + 1]
    assert [len(w.captured) for w in (*wrapped, whole)] == [1, 1, 1]


def test_a_failed_capture_leaves_no_graph_behind(gate):
    wrapper = wrap(lambda x: x * x.sum().item(), FULL, gate)
    with compilation_counter.expect(graphs_captured=0):
        for _ in range(2):
            with pytest.raises(CaptureError):
                run(wrapper, FULL, FOUR, torch.zeros(4))
    assert wrapper.captured == {}
