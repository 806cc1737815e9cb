"""What is dropped for memory: the costliest per expected hit first, no more than needed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kerf_runtime.config import CUDAGraphMode
from kerf_runtime.cudagraph.budget import expected_hits, fit_budget
from kerf_runtime.cudagraph.descriptor import BatchDescriptor

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE


def full(size):
    return FULL, BatchDescriptor(size, True)


def pieces(size):
    return PIECEWISE, BatchDescriptor(size)


keys = st.tuples(st.sampled_from([full, pieces]), st.integers(1, 64)).map(lambda k: k[0](k[1]))
measurements = st.dictionaries(keys, st.integers(0, 1000), max_size=12)


@given(measurements, st.integers(0, 4000), st.dictionaries(keys, st.floats(0, 50), max_size=12))
def test_what_is_kept_fits_and_every_graph_is_kept_or_reported(measured, budget, hits):
    for expected in (None, hits):
        decision = fit_budget(measured, budget, expected_hits=expected)
        assert decision.kept_bytes == sum(measured[key] for key in decision.kept) <= budget
        gone = [graph.key for graph in decision.dropped]
        assert sorted([*decision.kept, *gone]) == sorted(measured)
        assert [graph.bytes for graph in decision.dropped] == [measured[key] for key in gone]
        assert all(graph.reason == "MemoryBudget" for graph in decision.dropped)


@given(measurements, st.integers(0, 4000))
def test_nothing_is_dropped_once_the_rest_fits(measured, budget):
    decision = fit_budget(measured, budget)
    if decision.dropped:
        assert decision.kept_bytes + decision.dropped[-1].bytes > budget
    else:
        assert decision.kept == tuple(measured)


@given(measurements.filter(bool), st.integers(0, 4000))
def test_with_equal_hits_no_dropped_graph_is_smaller_than_a_kept_one(measured, budget):
    decision = fit_budget(measured, budget)
    sizes = [graph.bytes for graph in decision.dropped]
    assert sizes == sorted(sizes, reverse=True)
    largest_kept = max((measured[key] for key in decision.kept), default=0)
    assert all(size >= largest_kept for size in sizes)


def test_a_large_graph_that_is_replayed_often_outlives_a_small_one_that_is_not():
    measured = {full(64): 800, full(8): 100, full(1): 50}
    decision = fit_budget(measured, 900, expected_hits={full(64): 100, full(8): 1, full(1): 10})
    assert [graph.key for graph in decision.dropped] == [full(8)]
    decision = fit_budget(measured, 900, expected_hits={full(64): 100, full(8): 20})
    assert [graph.key for graph in decision.dropped] == [full(1)]  # never expected


def test_a_graph_without_bytes_of_its_own_is_not_worth_dropping():
    decision = fit_budget({full(8): 10, full(4): 0}, 5, expected_hits={full(8): 1})
    assert decision.kept == (full(4),)
    assert decision.kept_bytes == 0


def test_small_batches_are_expected_more_often_and_every_doubling_equally_often():
    hits = expected_hits([full(64), full(32), full(16), pieces(32), pieces(2)])
    assert hits[full(64)] == pytest.approx(hits[full(32)], rel=0.05)
    # A batch runs in the smallest graph of its kind: up to 16 decodes in the one, 3 to 32 mixed tokens in the other.
    assert hits[full(16)] == sum(1 / n for n in range(1, 17))
    assert hits[pieces(32)] == sum(1 / n for n in range(3, 33))
    assert hits[pieces(2)] == 1.5


def test_of_graphs_of_equal_bytes_one_for_batches_that_seldom_come_goes_first():
    ladder = [full(size) for size in (1, 2, 4, 8, 16, 24, 32, 40)]
    measured = dict.fromkeys(ladder, 100)
    decision = fit_budget(measured, 500, expected_hits=expected_hits(ladder))
    assert [graph.key for graph in decision.dropped] == [full(40), full(32), full(24)]
