"""The memory of all graphs from trial recordings of a few."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kerf_runtime.config import CUDAGraphMode
from kerf_runtime.cudagraph.descriptor import BatchDescriptor
from kerf_runtime.cudagraph.dispatcher import capture_plan
from kerf_runtime.cudagraph.estimate import (
    GRAIN,
    MemoryEstimate,
    Trial,
    estimate_memory,
    next_trials,
)

MIB = 2**20
SIZES = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
PLAN = capture_plan(CUDAGraphMode.FULL_AND_PIECEWISE, SIZES, 256)


PIECEWISE = CUDAGraphMode.PIECEWISE


def key(mode: CUDAGraphMode, size: int, uniform: bool = False):
    return mode, BatchDescriptor(size, uniform)


def test_trials_of_a_pool_are_the_largest_of_each_kind_and_some_of_all_sizes():
    keys = next_trials(PLAN, [], pooled=True)
    sizes = [d.num_tokens for mode, d in keys if mode is PIECEWISE]
    assert sizes == [512, 496, 432, 352, 272, 224, 184, 144, 104, 64, 24, 1]
    sizes = [d.num_tokens for mode, d in keys if mode is not PIECEWISE]
    assert sizes == [256, 248, 224, 200, 176, 144, 120, 96, 64, 40, 16, 1]
    few = capture_plan(CUDAGraphMode.FULL_DECODE_ONLY, (1, 2, 4, 8), 8)
    assert next_trials(few, [], pooled=True) == few


def test_trials_of_own_buffers_are_the_largest_and_the_smallest():
    names = [(mode.value, d.num_tokens) for mode, d in next_trials(PLAN, [], pooled=False)]
    assert names == [("PIECEWISE", 512), ("PIECEWISE", 1), ("FULL", 256), ("FULL", 1)]


def test_the_largest_graph_that_computes_logits_is_always_tried():
    def decode_sizes(**options):
        keys = next_trials(PLAN, [], **options)
        return [d.num_tokens for mode, d in keys if mode is not PIECEWISE]

    sizes = decode_sizes(pooled=True, logits_rows=85)
    assert sizes == [256, 248, 224, 200, 176, 144, 120, 96, 80, 64, 40, 16, 1]
    assert decode_sizes(pooled=True, logits_rows=500)[0] == 256
    # Two lines: one of graphs without logits, one of those with them.
    assert decode_sizes(pooled=False, logits_rows=85) == [256, 88, 80, 1]


def test_buffers_for_logits_make_another_line():
    rows, logits = 85, 1000

    def size_of(key):
        own = 10 * key[1].num_tokens
        return own + (logits * key[1].num_tokens if key[1].num_tokens <= rows else 0)

    plan = capture_plan(CUDAGraphMode.FULL_DECODE_ONLY, SIZES, 256)
    tried = next_trials(plan, [], pooled=False, logits_rows=rows)
    trials = [Trial(key, size_of(key)) for key in tried]
    found = estimate_memory(plan, trials, pooled=False, logits_rows=rows)
    assert found.graphs == {key: size_of(key) for key in plan}


def test_nothing_to_capture_needs_nothing():
    assert next_trials([], [], pooled=True) == []
    assert estimate_memory([], [], pooled=True).total() == 0


MIXED = (
    170, 4, 4, 6, 4, 2, 6, 4, 6, 4, 4, 4, 8, 2, 4, 6, 4, 4, 4, 4, 4, 6, 4, 4, 6, 4,
    4, 4, 4, 4, 6, 2, 10, 6, 4, 6, 2, 4, 6, 4, 4, 6, 4, 6, 4, 4, 4, 6, 4, 4, 4,
)  # fmt: skip
DECODE = (
    0, 2, 2, 0, 2, 0, 2, 0, 0, 2, 0, 2, 0, 2, 2, 0, 4, 0, 0, 2, 0, 4, 0, 0, 4, 0, 2, 0, 0, 2, 0, 2,
    0, 2, 2,
)  # fmt: skip
"""MiB that each graph of PLAN took, a model of Llama-8B's shape on an H200; 98 of the first are the pool."""


@given(phase=st.floats(0, 1, exclude_max=True))
def test_what_the_driver_hands_out_in_grains_is_estimated_by_its_mean(phase):
    taken = dict(zip(PLAN, (*MIXED, *DECODE), strict=True))
    keys = next_trials(PLAN, [], pooled=True)
    # A trial sees the grains that its own graphs make full, wherever in a grain it begins.
    trials, used = [], phase
    for k in keys:
        pieces = k[0] is PIECEWISE
        before, used = int(used), used + (2.28 if pieces else 0.6)
        size = MIXED[0] if k == PLAN[0] else 2 * (int(used) - before)
        pool = 98 if k == PLAN[0] else 0
        trials.append(Trial(k, size * MIB, pool * MIB, *((33, 322) if pieces else (1, 362))))
    estimate = estimate_memory(PLAN, trials, pooled=True)
    assert estimate.graphs.keys() == set(PLAN)
    assert estimate.total() == pytest.approx(sum(taken.values()) * MIB, rel=0.05)
    assert not estimate.disturbed
    assert next_trials(PLAN, trials, pooled=True) == []
    assert estimate.shared == pytest.approx((170 - 98) * MIB, rel=0.1)
    # The largest of all needs the most of the pool.
    assert max(estimate.graphs, key=lambda k: estimate.graphs[k]) == PLAN[0]


@given(
    phase=st.floats(0, 1, exclude_max=True),
    pool=st.integers(0, 40),
    each=st.floats(0, 2),  # grains of a graph
    count=st.integers(1, 128),
)
def test_where_a_grain_matters_more_graphs_are_tried(phase, pool, each, count):
    plan = capture_plan(CUDAGraphMode.FULL, tuple(range(1, count + 1)), count)
    trials: list[Trial] = []
    used = phase
    while keys := next_trials(plan, trials, pooled=True):
        for k in keys:
            before, used = int(used), used + each
            held = pool if not trials else 0
            trials.append(Trial(k, (held + int(used) - before) * GRAIN, held * GRAIN, nodes=360))
    assert len({trial.key for trial in trials}) == len(trials)
    estimate = estimate_memory(plan, trials, pooled=True)
    needed = pool + int(phase + each * len(plan))
    assert abs(estimate.total() / GRAIN - needed) <= 0.1 * needed + 1


def test_memory_that_another_process_took_meanwhile_is_not_multiplied():
    keys = next_trials(PLAN, [], pooled=True)
    trials = [Trial(k, 4 * MIB, graphs=33, nodes=322) for k in keys]
    trials[3] = Trial(keys[3], 5000 * MIB, graphs=33, nodes=322)
    estimate = estimate_memory(PLAN, trials, pooled=True)
    assert estimate.disturbed
    assert estimate.total() < 2 * 4 * MIB * len(PLAN)


def test_own_buffers_are_on_a_line():
    def size(tokens: int) -> int:
        return 100 + 7 * tokens

    keys = next_trials(PLAN, [], pooled=False)
    trials = [Trial(k, size(k[1].num_tokens)) for k in keys]
    estimate = estimate_memory(PLAN, trials, pooled=False)
    assert estimate.shared == 0
    assert all(estimate.graphs[k] == size(k[1].num_tokens) for k in PLAN)


@pytest.mark.parametrize("pooled", [False, True])
def test_a_single_graph_is_its_own_trial(pooled):
    plan = [key(CUDAGraphMode.FULL, 8, uniform=True)]
    trials = [Trial(plan[0], 50, 20 if pooled else 0)]
    assert next_trials(plan, [], pooled=pooled) == plan
    assert estimate_memory(plan, trials, pooled=pooled).graphs == {plan[0]: 50}


@given(
    sizes=st.lists(st.integers(0, 10**9), min_size=1, max_size=20),
    shared=st.integers(0, 10**9),
    total=st.integers(0, 10**10),
)
def test_a_measured_total_is_split_without_a_byte_lost(sizes, shared, total):
    graphs = {key(CUDAGraphMode.FULL, n + 1): size for n, size in enumerate(sizes)}
    estimate = MemoryEstimate(shared, graphs)
    split = estimate.scaled_to(total)
    assert split.total() == total
    assert split.graphs.keys() == graphs.keys()
    assert min(split.graphs.values()) >= 0
    exact = estimate.scaled_to(estimate.total())
    assert exact == estimate


@given(
    pool=st.integers(0, 10**9),
    count=st.integers(1, 40),
    each=st.integers(0, 10**6),  # less than a driver may take for one graph
    once=st.integers(0, 10**8),
)
def test_without_grains_the_estimate_is_exact(pool, count, each, once):
    plan = capture_plan(CUDAGraphMode.FULL, tuple(range(1, count + 1)), count)
    keys = next_trials(plan, [], pooled=True)
    first = Trial(keys[0], once + each + pool, pool)
    trials = [first, *(Trial(k, each) for k in keys[1:])]
    estimate = estimate_memory(plan, trials, pooled=True)
    assert estimate.total() == once + pool + each * len(plan)


def test_graphs_can_be_taken_out():
    estimate = MemoryEstimate(5, {key(CUDAGraphMode.FULL, 1): 10, key(CUDAGraphMode.FULL, 2): 20})
    assert estimate.without([key(CUDAGraphMode.FULL, 2)]).total() == 15
