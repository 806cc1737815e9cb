"""Counters of the compiler, and the assertion that tests make on them."""

from __future__ import annotations

import pytest

from kerf_runtime.compilation.counters import CompilationCounter


def test_expect_accepts_exactly_the_given_changes():
    counter = CompilationCounter(graphs_seen=5)
    with counter.expect(graphs_seen=2, dynamo_traces=0):
        counter.graphs_seen += 2
        counter.graph_replays += 1  # not named, not looked at


@pytest.mark.parametrize("actual", [0, 1, 3])
def test_expect_shows_expected_and_actual_changes(actual):
    counter = CompilationCounter()
    with (
        pytest.raises(AssertionError, match=rf"'graphs_seen': 2.*got.*'graphs_seen': {actual}"),
        counter.expect(graphs_seen=2),
    ):
        counter.graphs_seen += actual


def test_expect_refuses_a_counter_that_does_not_exist():
    with (
        pytest.raises(TypeError, match="no such counter: graphs_sen"),
        CompilationCounter().expect(graphs_sen=1),
    ):
        pass


def test_an_error_in_the_block_is_not_hidden_by_the_expectation():
    counter = CompilationCounter()
    with pytest.raises(ZeroDivisionError), counter.expect(graphs_seen=1):
        raise ZeroDivisionError


def test_a_snapshot_is_a_copy():
    counter = CompilationCounter()
    before = counter.snapshot()
    counter.graphs_seen += 1
    assert before["graphs_seen"] == 0
    assert counter.snapshot()["graphs_seen"] == 1
