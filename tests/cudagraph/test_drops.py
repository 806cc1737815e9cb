"""What was given up is told once for every reason, in texts that fit a status."""

from __future__ import annotations

from dataclasses import asdict

from kerf_operator.api.status import GraphReason
from kerf_runtime.config import CUDAGraphMode
from kerf_runtime.cudagraph.descriptor import BatchDescriptor
from kerf_runtime.cudagraph.drops import DroppedGraph, Drops
from kerf_runtime.reasons import ConfigReason

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE


def full(size):
    return FULL, BatchDescriptor(size, True)


def pieces(size):
    return PIECEWISE, BatchDescriptor(size)


def drops(keys, why="graphMemoryBudget is 100 bytes", reason=ConfigReason.MEMORY_BUDGET):
    found = Drops(CUDAGraphMode.FULL_AND_PIECEWISE)
    found.add([DroppedGraph(key, 80, reason) for key in keys], why)
    return found


def test_changes_name_the_graphs_before_and_after_and_the_reason():
    [change] = drops([pieces(8), full(8)]).changes([pieces(4), full(4)])
    assert change.field == "captureSizes"
    assert (change.requested, change.effective) == ("4 graphs", "2 graphs")
    assert change.reason == "MemoryBudget"
    assert change.message == (
        "graphMemoryBudget is 100 bytes; dropped FULL decode 8, PIECEWISE mixed 8; "
        "kept FULL decode 4, PIECEWISE mixed 4"
    )


def test_every_reason_has_a_change_that_begins_where_the_one_before_ended():
    found = drops([pieces(8)])
    found.add([DroppedGraph(full(6), 0, ConfigReason.CAPTURE_FAILED)], "it waits for a value")
    found.add([DroppedGraph(full(5), 0, ConfigReason.CAPTURE_FAILED)], "it waits again")
    budget, failed = found.changes([full(4)])
    assert (budget.requested, budget.effective) == ("4 graphs", "3 graphs")
    assert (failed.requested, failed.effective) == ("3 graphs", "1 graphs")
    assert failed.reason == "CaptureFailed"
    assert failed.message == "it waits for a value; dropped FULL decode 5 6; kept FULL decode 4"


def test_the_longest_change_fits_the_status_of_a_model_deployment():
    keys = [kind(size) for kind in (full, pieces) for size in range(65536 - 256, 65536)]
    for change in drops(keys, "x" * 10**5).changes([]):
        GraphReason.model_validate(asdict(change))


def test_when_nothing_is_left_the_mode_is_none():
    sizes, mode = drops([full(8)]).changes([])
    assert (sizes.requested, sizes.effective) == ("1 graphs", "0 graphs")
    assert sizes.message == "graphMemoryBudget is 100 bytes; dropped FULL decode 8; kept none"
    assert (mode.field, mode.requested) == ("cudagraphMode", "FULL_AND_PIECEWISE")
    assert (mode.effective, mode.reason) == ("NONE", "MemoryBudget")


def test_without_drops_nothing_changes():
    assert drops([]).changes([full(8)]) == ()


def test_a_dropped_graph_is_shown_with_its_reason():
    assert drops([full(8)]).graphs[0].to_json() == {
        "mode": "FULL",
        "num_tokens": 8,
        "uniform_decode": True,
        "bytes": 80,
        "reason": "MemoryBudget",
    }
