"""Which graph runs a batch, and which graphs there are."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kerf_runtime.config import CUDAGraphMode
from kerf_runtime.cudagraph.descriptor import BatchDescriptor
from kerf_runtime.cudagraph.dispatcher import Dispatcher, capture_plan
from kerf_runtime.reasons import DispatchReason

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
DECODE_ONLY, BOTH = CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE
EXACT, PADDED, ABOVE, NO_GRAPH, MODE_NONE = (
    DispatchReason.EXACT,
    DispatchReason.PADDED,
    DispatchReason.ABOVE_LARGEST,
    DispatchReason.NO_GRAPH,
    DispatchReason.MODE_NONE,
)

modes = st.sampled_from(list(CUDAGraphMode))
size_lists = st.lists(st.integers(1, 64), min_size=1, max_size=8).map(
    lambda s: tuple(sorted(set(s)))
)
batches = st.lists(st.tuples(st.integers(1, 80), st.booleans()), max_size=30)


def decide(mode, captured, tokens, uniform):
    decision = Dispatcher(mode, captured).dispatch(tokens, uniform)
    return (
        decision.mode,
        decision.descriptor.num_tokens,
        decision.descriptor.uniform_decode,
        decision.reason,
    )


def full(size, uniform):
    return (FULL, BatchDescriptor(size, uniform))


def piecewise(size):
    return (PIECEWISE, BatchDescriptor(size, False))


@pytest.mark.parametrize(
    ("captured", "tokens", "uniform", "expected"),
    [
        # Exact FULL is preferred to every other graph.
        ([full(4, True), full(4, False), piecewise(4)], 4, True, (FULL, 4, True, EXACT)),
        ([full(4, True), full(4, False), piecewise(4)], 3, True, (FULL, 4, True, PADDED)),
        # Then FULL of batches of any kind, then PIECEWISE.
        ([full(2, True), full(8, False), piecewise(4)], 3, True, (FULL, 8, False, PADDED)),
        ([full(2, True), full(2, False), piecewise(4)], 4, True, (PIECEWISE, 4, False, EXACT)),
        ([full(2, True), piecewise(4)], 3, True, (PIECEWISE, 4, False, PADDED)),
        # A mixed batch never runs a graph that was recorded for decode.
        ([full(8, True), piecewise(4)], 3, False, (PIECEWISE, 4, False, PADDED)),
        ([full(8, True), piecewise(4)], 5, False, (NONE, 5, False, ABOVE)),
        # Above the largest size nothing is padded.
        ([full(2, True), piecewise(4)], 5, True, (NONE, 5, True, ABOVE)),
        ([], 5, True, (NONE, 5, True, NO_GRAPH)),
        ([full(8, True)], 5, False, (NONE, 5, False, NO_GRAPH)),
    ],
)
def test_graphs_are_tried_in_order(captured, tokens, uniform, expected):
    assert decide(BOTH, captured, tokens, uniform) == expected


@pytest.mark.parametrize(
    ("mode", "uniform", "expected"),
    [
        (NONE, True, (NONE, 3, True, MODE_NONE)),
        (NONE, False, (NONE, 3, False, MODE_NONE)),
        (PIECEWISE, True, (PIECEWISE, 4, False, PADDED)),
        (PIECEWISE, False, (PIECEWISE, 4, False, PADDED)),
        (FULL, True, (FULL, 4, True, PADDED)),
        (FULL, False, (FULL, 4, False, PADDED)),
        (DECODE_ONLY, True, (FULL, 4, True, PADDED)),
        (DECODE_ONLY, False, (NONE, 3, False, MODE_NONE)),
        (BOTH, True, (FULL, 4, True, PADDED)),
        (BOTH, False, (PIECEWISE, 4, False, PADDED)),
    ],
)
def test_each_mode_answers_with_the_graphs_of_its_own_plan(mode, uniform, expected):
    assert decide(mode, capture_plan(mode, (1, 2, 4), 4), 3, uniform) == expected


@given(modes, size_lists, st.integers(1, 70), batches)
def test_a_decision_never_drops_tokens_and_names_only_graphs_that_exist(
    mode, sizes, max_seqs, batches
):
    plan = capture_plan(mode, sizes, max_seqs)
    dispatcher = Dispatcher(mode, plan)
    for tokens, uniform in batches:
        decision = dispatcher.dispatch(tokens, uniform)
        assert decision.descriptor.num_tokens >= tokens
        if decision.mode is NONE:
            assert decision.descriptor == BatchDescriptor(tokens, uniform)
            assert decision.reason in (MODE_NONE, ABOVE, NO_GRAPH)
        else:
            assert (decision.mode, decision.descriptor) in plan
            assert uniform or not decision.descriptor.uniform_decode
            exact = decision.descriptor.num_tokens == tokens
            assert decision.reason is (EXACT if exact else PADDED)


@given(modes, size_lists, batches)
def test_every_decision_is_counted_once_under_a_captured_size_or_0(mode, sizes, batches):
    dispatcher = Dispatcher(mode, capture_plan(mode, sizes, 16))
    expected = Counter()
    for tokens, uniform in batches:
        decision = dispatcher.dispatch(tokens, uniform)
        size = 0 if decision.mode is NONE else decision.descriptor.num_tokens
        expected[decision.mode, size, decision.reason] += 1
    assert dispatcher.counts == expected
    assert {size for _, size, _ in dispatcher.counts} <= {0, *sizes}
    assert sum(dispatcher.totals().values()) == len(batches)
    assert set(dispatcher.totals()) == {"FULL", "PIECEWISE", "NONE"}
    detail = dispatcher.detail()
    assert sum(row["count"] for row in detail) == len(batches)
    for mode_name, total in dispatcher.totals().items():
        assert total == sum(row["count"] for row in detail if row["mode"] == mode_name)


@given(modes, size_lists, st.integers(1, 70))
def test_the_plan_is_largest_first_and_has_nothing_twice(mode, sizes, max_seqs):
    plan = capture_plan(mode, sizes, max_seqs)
    assert len(set(plan)) == len(plan)
    for uniform in (False, True):
        kind = [d.num_tokens for _, d in plan if d.uniform_decode is uniform]
        assert kind == sorted(kind, reverse=True)


@given(modes, size_lists, st.integers(1, 70))
def test_mixed_graphs_have_every_size_and_decode_graphs_stop_where_all_sequences_fit(
    mode, sizes, max_seqs
):
    plan = capture_plan(mode, sizes, max_seqs)
    mixed = {d.num_tokens for m, d in plan if not d.uniform_decode}
    decode = {d.num_tokens for m, d in plan if d.uniform_decode}
    assert mixed == (set() if mode.mixed_mode() is NONE else set(sizes))
    if mode.decode_mode() is FULL:
        enough = min((s for s in sizes if s >= max_seqs), default=max(sizes))
        assert decode == {size for size in sizes if size <= enough}
    else:
        assert decode == set()


@pytest.mark.parametrize(
    ("mode", "plan"),
    [
        (NONE, []),
        (PIECEWISE, [piecewise(16), piecewise(8), piecewise(4)]),
        (FULL, [full(16, False), full(8, False), full(4, False), full(8, True), full(4, True)]),
        (DECODE_ONLY, [full(8, True), full(4, True)]),
        (BOTH, [piecewise(16), piecewise(8), piecewise(4), full(8, True), full(4, True)]),
    ],
)
def test_the_plan_of_each_mode_by_example(mode, plan):
    assert capture_plan(mode, (4, 8, 16), 6) == plan


def test_a_plan_without_sizes_is_empty():
    assert capture_plan(BOTH, (), 6) == []
