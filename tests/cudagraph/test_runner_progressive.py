"""Trial captures tell the memory; a progressive capture goes on between steps and disturbs none of them."""

from __future__ import annotations

import pytest
import torch
from tests.compilation.helpers import make_effective, make_spec, open_cache, prepare
from tests.compilation.models import llama
from tests.cudagraph.steps import MAX_SEQS, MAX_TOKENS, WORKLOAD, Buffers, play

from kerf_runtime.compilation.counters import compilation_counter
from kerf_runtime.config import CaptureMode
from kerf_runtime.config.compilation import CUDAGraphMode
from kerf_runtime.cudagraph.runner import GraphRunner
from kerf_runtime.errors import CaptureError
from kerf_runtime.forward_context import get_forward_context
from kerf_runtime.platforms import current_platform
from kerf_runtime.reasons import ConfigReason

SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 12, 16]
FIRST = {"FULL": [16, 8, 4, 2, 1, 6, 4, 2, 1], "FULL_DECODE_ONLY": [6, 4, 2, 1]}
"""Sizes that are there at once: of mixed batches, then of decode batches."""


@pytest.fixture(scope="module")
def loaded():
    return llama(2)


def start(loaded, mode="FULL_DECODE_ONLY", **compilation):
    """An uncaptured runner and its buffers; no machine is too busy for its progressive captures."""
    options = {"captureDelayMilliseconds": 60_000, **compilation}
    spec = make_spec(
        level=0,
        cudagraphMode=mode,
        captureSizes=SIZES,
        engine={"maxNumSeqs": MAX_SEQS, "maxNumBatchedTokens": MAX_TOKENS},
        **options,
    )
    prepared = prepare(loaded, open_cache(None, "none"), spec=spec)
    runner = GraphRunner(prepared, make_effective(spec), current_platform(), max_num_seqs=MAX_SEQS)
    return runner, Buffers(loaded, loaded.config.num_kv_heads, loaded.config.head_dim)


def silent(*_):
    """No progress."""


def captured(runner):
    return [graph["num_tokens"] for graph in runner.report()["descriptors"]]


def test_the_estimate_is_what_all_graphs_then_hold(loaded):
    runner, buffers = start(loaded, "FULL")
    with compilation_counter.expect(trial_captures=4, graphs_captured=0):
        estimated = runner.estimate_memory(buffers.dummy, silent)
    assert runner.report()["captured"] == 0
    with compilation_counter.expect(trial_captures=0, graphs_captured=16):
        runner.capture_all(buffers.dummy, silent)
    report = runner.report()
    assert report["estimated_bytes"] == estimated > 0
    assert report["memory_bytes"] == pytest.approx(estimated, rel=0.1)
    assert abs(report["estimate_error"]) < 0.1
    assert report["shared_bytes"] == 0
    assert report["peak_bytes"] == report["memory_bytes"]


def test_what_cannot_fit_the_budget_is_never_recorded(loaded):
    runner, buffers = start(loaded)
    everything = runner.estimate_memory(buffers.dummy, silent)
    runner, buffers = start(loaded, graphMemoryBudget=str(everything // 2))
    within = runner.estimate_memory(buffers.dummy, silent)
    assert within <= everything // 2
    kept = [descriptor.num_tokens for _, descriptor in runner.plan]
    with compilation_counter.expect(graphs_captured=len(kept)):
        runner.capture_all(buffers.dummy, silent)
    assert captured(runner) == kept == [4, 3, 2, 1]
    assert runner.report()["memory_bytes"] <= everything // 2
    assert {change.reason for change in runner.changes} == {ConfigReason.MEMORY_BUDGET}


@pytest.mark.parametrize("mode", FIRST)
def test_ready_comes_after_the_first_graphs_and_the_others_follow_one_unit_at_a_time(loaded, mode):
    runner, buffers = start(loaded, mode, captureMode="progressive")
    runner.capture_all(buffers.dummy, silent)
    assert captured(runner) == FIRST[mode]
    assert runner.pending == len(runner.plan) - len(FIRST[mode])
    assert len(runner.report()["pending"]) == runner.pending
    assert runner.changes == ()
    assert runner.capture_mode is CaptureMode.PROGRESSIVE
    units = 0
    while runner.pending:
        before = len(captured(runner))
        runner.capture_next(buffers.dummy, idle=False)
        assert len(captured(runner)) - before in (0, 1)
        units += 1
    sizes = [descriptor.num_tokens for _, descriptor in runner.plan]
    assert captured(runner) == sizes
    # A warm-up for each size that had none, and a recording for each graph.
    new = {size for size in sizes if size not in FIRST[mode]}
    assert units == len(new) + len(sizes) - len(FIRST[mode])
    assert runner.report()["longest_delay_seconds"] > 0


def test_batches_run_in_the_next_larger_graph_until_their_own_is_there(loaded):
    runner, buffers = start(loaded, captureMode="progressive")
    runner.capture_all(buffers.dummy, silent)
    for _ in range(3):
        assert runner.dispatch(3, True).descriptor.num_tokens == 4
    assert runner.dispatch(5, True).descriptor.num_tokens == 6
    runner.capture_next(
        buffers.dummy, idle=False
    )  # the warm-up of 3, which was wanted more often than 5
    assert runner.dispatch(3, True).descriptor.num_tokens == 4
    runner.capture_next(buffers.dummy, idle=False)
    assert runner.dispatch(3, True).descriptor.num_tokens == 3
    assert runner.pending == 1
    assert runner.dispatch_detail() == [
        {"mode": "FULL", "size": 3, "reason": "Exact", "count": 1},
        {"mode": "FULL", "size": 4, "reason": "Padded", "count": 4},
        {"mode": "FULL", "size": 6, "reason": "Padded", "count": 1},
    ]


def test_captures_between_steps_change_no_result(loaded):
    plain, buffers = start(loaded, "FULL")
    plain.capture_all(buffers.dummy, silent)
    expected, _ = play(plain, buffers)

    runner, buffers = start(loaded, "FULL", captureMode="progressive")
    runner.capture_all(buffers.dummy, silent)
    with compilation_counter.expect(captures_after_startup=0):
        for step, wanted in zip(WORKLOAD, expected, strict=True):
            [got], _ = play(runner, buffers, [step])
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
            if runner.pending:
                runner.capture_next(buffers.dummy, idle=False)


class Clock:
    """Time that only passes in ``Slow``, in ``cudagraph.runner``."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr("kerf_runtime.cudagraph.runner.time.perf_counter", lambda: self.now)


@pytest.fixture
def slow(loaded, monkeypatch):
    """Seconds that a forward takes from now on in Python, by whether it is recorded."""
    clock, seconds = Clock(monkeypatch), {"warm-up": 0.0, "recording": 0.0}

    def pass_time(*_):
        recorded = get_forward_context().mode is not CUDAGraphMode.NONE
        clock.now += seconds["recording" if recorded else "warm-up"]

    hook = loaded.model.register_forward_pre_hook(pass_time)
    yield seconds
    hook.remove()


LATER = [5, 3]


@pytest.mark.parametrize("what", ["warm-up", "recording"])
def test_graphs_that_take_longer_than_a_step_may_be_delayed_are_captured_before_serving(
    loaded, slow, what
):
    slow[what] = 0.002
    runner, buffers = start(loaded, captureMode="progressive", captureDelayMilliseconds=1)
    runner.capture_all(buffers.dummy, silent)
    assert runner.pending == 0
    assert captured(runner) == [6, 5, 4, 3, 2, 1]
    [change] = runner.changes
    assert (change.field, change.requested, change.effective) == (
        "captureMode",
        "progressive",
        "eager",
    )
    assert change.reason is ConfigReason.CAPTURE_DELAY_LIMIT
    assert change.message.endswith("takes longer for FULL decode 3 5")
    assert runner.capture_mode is CaptureMode.EAGER


@pytest.mark.parametrize("what", ["warm-up", "recording"])
def test_what_no_longer_fits_between_two_steps_waits_until_there_is_none(
    loaded, slow, what, caplog
):
    runner, buffers = start(loaded, captureMode="progressive", captureDelayMilliseconds=1)
    runner.capture_all(buffers.dummy, silent)
    assert runner.capture_due
    slow[what] = 0.002
    while runner.capture_next(buffers.dummy, idle=False):
        pass
    assert runner.pending == 1  # the first unit that was late is the last one
    assert not runner.capture_due
    assert runner.report()["longest_delay_seconds"] == pytest.approx(0.002)
    assert "captureDelayMilliseconds allows 0.001 s" in caplog.text
    slow[what] = 0.003
    while runner.pending:
        assert runner.capture_next(buffers.dummy, idle=True)
    assert captured(runner) == [6, 5, 4, 3, 2, 1]
    assert runner.report()["longest_delay_seconds"] == pytest.approx(0.002)
    assert runner.changes == ()


@pytest.mark.parametrize(
    ("error", "reason", "gone"),
    [
        (CaptureError("the forward waits"), "CaptureFailed", [5]),
        (torch.OutOfMemoryError("CUDA out of memory"), "CaptureOutOfMemory", LATER),
    ],
)
@pytest.mark.parametrize("recorded", [False, True])
def test_a_graph_that_cannot_be_captured_while_serving_is_dropped_and_serving_goes_on(
    loaded, error, reason, gone, recorded, caplog
):
    runner, buffers = start(loaded, captureMode="progressive")
    runner.estimate_memory(buffers.dummy, silent)
    runner.capture_all(buffers.dummy, silent)

    def fail(*_):
        if (get_forward_context().mode is CUDAGraphMode.FULL) is recorded:
            raise error

    if recorded:
        assert runner.capture_next(buffers.dummy, idle=False)
    hook = loaded.model.register_forward_pre_hook(fail)
    try:
        assert runner.capture_next(buffers.dummy, idle=False)
    finally:
        hook.remove()
    report = runner.report()
    assert [graph["num_tokens"] for graph in report["dropped"]] == gone
    assert {graph["reason"] for graph in report["dropped"]} == {reason}
    assert all(graph["bytes"] > 0 for graph in report["dropped"])
    assert report["planned"] == 6 - len(gone)
    [change] = runner.changes
    assert (change.field, change.requested, change.reason) == ("captureSizes", "6 graphs", reason)
    assert change.effective == f"{6 - len(gone)} graphs"
    assert f"dropped {len(gone)} graphs ({reason}), the first is FULL decode 5: " in caplog.text
    with compilation_counter.expect(captures_after_startup=0):
        play(runner, buffers)
    while runner.pending:
        runner.capture_next(buffers.dummy, idle=True)
    assert captured(runner) == [size for size in (6, 5, 4, 3, 2, 1) if size not in gone]
    assert runner.dispatch(5, True).descriptor.num_tokens == 6


def test_a_budget_holds_for_what_is_captured_later_too(loaded):
    whole, buffers = start(loaded)
    everything = whole.estimate_memory(buffers.dummy, silent)
    runner, buffers = start(
        loaded, captureMode="progressive", graphMemoryBudget=str(everything // 2)
    )
    runner.estimate_memory(buffers.dummy, silent)
    runner.capture_all(buffers.dummy, silent)
    while runner.pending:
        runner.capture_next(buffers.dummy, idle=False)
    assert captured(runner) == [4, 3, 2, 1]
    assert runner.report()["memory_bytes"] <= everything // 2
