"""What a progressive capture records first, and what next."""

from __future__ import annotations

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from kerf_runtime.config import CUDAGraphMode
from kerf_runtime.cudagraph.descriptor import BatchDescriptor
from kerf_runtime.cudagraph.dispatcher import capture_plan
from kerf_runtime.cudagraph.progressive import (
    Pending,
    UnitSeconds,
    delay_change,
    first_graphs,
    next_graph,
)

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE
SIZES = (1, 2, 4, *range(8, 97, 8))
PLAN = capture_plan(CUDAGraphMode.FULL_AND_PIECEWISE, SIZES, 48)


def sizes(keys, mode):
    return [descriptor.num_tokens for m, descriptor in keys if m is mode]


def test_the_largest_of_each_kind_and_the_powers_of_two_come_first():
    first = first_graphs(PLAN)
    assert sizes(first, PIECEWISE) == [96, 64, 32, 16, 8, 4, 2, 1]
    assert sizes(first, FULL) == [48, 32, 16, 8, 4, 2, 1]


def test_the_largest_that_computes_logits_comes_first_too():
    assert sizes(first_graphs(PLAN, logits_rows=45), FULL) == [48, 40, 32, 16, 8, 4, 2, 1]
    assert sizes(first_graphs(PLAN, logits_rows=45), PIECEWISE) == sizes(
        first_graphs(PLAN), PIECEWISE
    )


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


def decode(size, mode=FULL):
    return mode, BatchDescriptor(size, True)


def test_a_unit_is_expected_to_take_what_the_last_one_of_at_least_its_size_took():
    seconds = UnitSeconds()
    assert seconds.expected(decode(8)) == inf
    for size, took in ((48, 4.0), (16, 2.0)):
        seconds.add(decode(size), took)
    assert [seconds.expected(decode(size)) for size in (8, 16, 24, 48, 49)] == [2, 2, 4, 4, inf]
    seconds.add(decode(48), 3.0)
    assert [seconds.expected(decode(size)) for size in (8, 16, 24, 48, 49)] == [3, 3, 3, 3, inf]
    # Other graphs, other batches and warm-ups are other units.
    assert seconds.expected((FULL, BatchDescriptor(8))) == inf
    assert seconds.expected(decode(8, PIECEWISE)) == inf
    assert seconds.expected(decode(8, NONE)) == inf


def pending(limit=1.0, warm=(), **seconds):
    """Decode graphs of 24 and 40 are left; ``seconds`` of a warm-up and of a recording, of 32 and of 48."""
    found = Pending(limit, lambda descriptor: descriptor.num_tokens not in warm)
    for name, took in seconds.items():
        found.seconds.add(decode(int(name[1:]), NONE if name[0] == "w" else FULL), took)
    found.leave([decode(40), decode(24)])
    return found


CAPTURED = [decode(48), decode(32)]
FAST = {"w48": 0.5, "r48": 0.5, "w32": 0.5, "r32": 0.5}


def test_what_fits_between_two_steps_is_due():
    found = pending(**FAST)
    assert found.due
    assert found.slow() == []
    assert found.choose(CAPTURED, {}, idle=False) == decode(40)
    assert found.unit(decode(40)) == decode(40, NONE)
    assert pending(warm={40}, **FAST).unit(decode(40)) == decode(40)


def test_a_warm_up_that_takes_too_long_waits_until_there_is_no_step():
    found = pending(**FAST | {"w48": 1.5})
    assert found.slow() == [decode(40)]
    assert found.choose(CAPTURED, {(40, True): 100}, idle=False) == decode(24)
    assert found.choose(CAPTURED, {(40, True): 100}, idle=True) == decode(40)


def test_a_recording_that_takes_too_long_waits_once_its_batch_is_warm():
    slow = FAST | {"r48": 1.5, "r32": 1.5}
    found = pending(**slow)
    assert found.slow() == [decode(40), decode(24)]
    assert found.choose(CAPTURED, {}, idle=False) == decode(40)  # for its warm-up
    found = pending(warm={24, 40}, **slow)
    assert not found.due
    assert found.choose(CAPTURED, {}, idle=False) is None
    assert found.choose(CAPTURED, {}, idle=True) == decode(40)


def test_a_unit_that_became_slower_changes_what_may_run_next():
    found = pending(warm={24, 40}, **FAST)
    found.seconds.add(decode(40), 1.5)
    found.leave([decode(24)])
    assert not found.due
    found.leave([])
    assert found.choose(CAPTURED, {}, idle=True) is None


def test_what_is_captured_before_serving_for_its_length_is_told():
    some = delay_change(50, [decode(40), decode(24)], 3)
    assert (some.requested, some.effective) == ("progressive", "eager for 2 graphs")
    assert some.reason == "CaptureDelayLimit"
    assert some.message == (
        "captureDelayMilliseconds is 50; to warm up or to record takes longer for FULL decode 24 40"
    )
    assert delay_change(50, [decode(40)], 0).effective == "eager"
