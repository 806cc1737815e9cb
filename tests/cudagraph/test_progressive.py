"""What a progressive capture records first, and what next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kerf_runtime.config import CUDAGraphMode
from kerf_runtime.cudagraph.descriptor import BatchDescriptor
from kerf_runtime.cudagraph.dispatcher import capture_plan
from kerf_runtime.cudagraph.progressive import UnitSeconds, first_graphs, next_graph

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
SIZES = (1, 2, 4, *range(8, 97, 8))
PLAN = capture_plan(CUDAGraphMode.FULL_AND_PIECEWISE, SIZES, 48)


def sizes(keys, mode):
    return [descriptor.num_tokens for m, descriptor in keys if m is mode]


def test_the_largest_of_each_kind_and_the_powers_of_two_come_first():
    first = first_graphs(PLAN)
    assert sizes(first, PIECEWISE) == [96, 64, 32, 16, 8, 4, 2, 1]
    assert sizes(first, FULL) == [48, 32, 16, 8, 4, 2, 1]


@given(
    st.sets(st.integers(1, 300), min_size=1).map(lambda found: tuple(sorted(found))),
    st.integers(1, 300),
    st.sampled_from([m for m in CUDAGraphMode if m is not CUDAGraphMode.NONE]),
)
def test_every_batch_with_a_graph_has_one_from_the_start(found, seqs, mode):
    plan = capture_plan(mode, found, seqs)
    first = first_graphs(plan)
    assert [key for key in plan if key in first] == first
    for kind in {(m, d.uniform_decode) for m, d in plan}:
        of_kind = [d.num_tokens for m, d in plan if (m, d.uniform_decode) == kind]
        assert max(of_kind) in [d.num_tokens for m, d in first if (m, d.uniform_decode) == kind]


def pending_of(plan, captured):
    return [key for key in plan if key not in captured]


def test_without_traffic_the_largest_pending_graph_is_next():
    first = first_graphs(PLAN)
    assert next_graph(pending_of(PLAN, first), first, {}) == (
        PIECEWISE,
        BatchDescriptor(88, False),
    )


def test_the_graph_that_saves_the_most_padding_is_next():
    first = first_graphs(PLAN)
    pending = pending_of(PLAN, first)
    # 24 saves 8 rows of each of 100 batches of 17 to 24; 40 saves 8 of 99; 88 saves 8 of 10.
    batches = {(20, True): 60, (24, True): 40, (40, True): 99, (85, False): 10, (50, True): 1000}
    assert next_graph(pending, first, batches) == (FULL, BatchDescriptor(24, True))
    captured = [*first, (FULL, BatchDescriptor(24, True))]
    left = pending_of(PLAN, captured)
    assert next_graph(left, captured, batches) == (FULL, BatchDescriptor(40, True))


def test_decode_batches_count_where_they_run_in_graphs_of_mixed_ones():
    captured = [(PIECEWISE, BatchDescriptor(size)) for size in (128, 64, 8, 4)]
    pending = [(PIECEWISE, BatchDescriptor(size)) for size in (100, 5)]
    for decode in (True, False):
        assert next_graph(pending, captured, {(5, decode): 1000})[1].num_tokens == 5


def test_in_the_end_everything_is_captured():
    captured = first_graphs(PLAN)
    while pending := pending_of(PLAN, captured):
        captured.append(next_graph(pending, captured, {(70, False): 3, (20, True): 5}))
    assert sorted(captured) == sorted(PLAN)


def test_the_median_unit_is_what_the_next_is_expected_to_take():
    seconds = UnitSeconds()
    assert seconds.expected(FULL) == 0
    seconds.add(FULL, 9.0)  # loads what no other one has to
    assert seconds.expected(FULL) == 0
    for took in (0.5, 20.0, 1.0):
        seconds.add(FULL, took)
    assert seconds.expected(FULL) == 1.0
    assert seconds.expected(PIECEWISE) == 0
