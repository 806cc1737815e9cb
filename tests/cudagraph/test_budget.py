"""What is dropped for memory: the costliest per expected hit first, no more than needed."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kerf_operator.api.status import GraphReason
from kerf_runtime.config import CUDAGraphMode
from kerf_runtime.cudagraph.budget import budget_changes, fit_budget
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


def test_changes_name_the_graphs_before_and_after_and_the_budget():
    measured = {pieces(8): 80, pieces(4): 40, full(8): 80, full(4): 40}
    decision = fit_budget(measured, 100)
    [change] = budget_changes(
        CUDAGraphMode.FULL_AND_PIECEWISE, decision.kept, decision.dropped, 100
    )
    assert change.field == "captureSizes"
    assert (change.requested, change.effective) == ("4 graphs", "2 graphs")
    assert change.reason == "MemoryBudget"
    assert change.message == (
        "graphMemoryBudget is 100 bytes; dropped FULL decode 8, PIECEWISE mixed 8; "
        "kept FULL decode 4, PIECEWISE mixed 4"
    )


def test_the_longest_change_fits_the_status_of_a_model_deployment():
    measured = {kind(size): 1 for kind in (full, pieces) for size in range(65536 - 256, 65536)}
    gone = fit_budget(measured, 0).dropped
    for change in budget_changes(FULL, [], gone, 10**15):
        GraphReason.model_validate(asdict(change))


def test_when_nothing_is_left_the_mode_is_none():
    decision = fit_budget({full(8): 80}, 0)
    sizes, mode = budget_changes(FULL, decision.kept, decision.dropped, 0)
    assert (sizes.requested, sizes.effective) == ("1 graphs", "0 graphs")
    assert sizes.message == "graphMemoryBudget is 0 bytes; dropped FULL decode 8; kept none"
    assert (mode.field, mode.requested, mode.effective) == ("cudagraphMode", "FULL", "NONE")
    assert mode.reason == "MemoryBudget"


@pytest.mark.parametrize("budget", [80, 1000])
def test_without_drops_nothing_changes(budget):
    decision = fit_budget({full(8): 80}, budget)
    assert budget_changes(FULL, decision.kept, decision.dropped, budget) == ()
    assert decision.dropped == ()


def test_a_dropped_graph_is_shown_with_its_reason():
    [graph] = fit_budget({full(8): 80}, 0).dropped
    assert graph.to_json() == {
        "mode": "FULL",
        "num_tokens": 8,
        "uniform_decode": True,
        "bytes": 80,
        "reason": "MemoryBudget",
    }
