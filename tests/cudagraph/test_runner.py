"""Capture before serving, then run each step as dispatched: same results in every mode."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import replace

import pytest
import torch
from tests.compilation.helpers import make_effective, make_spec, open_cache, prepare
from tests.compilation.models import llama
from tests.compilation.shared import deep_llama, warm_deep_llama
from tests.cudagraph.steps import (
    MAX_SEQS,
    MAX_TOKENS,
    SIZES,
    WORKLOAD,
    Buffers,
    Step,
    play,
    play_without_graphs,
)

from kerf_runtime.compilation.counters import compilation_counter
from kerf_runtime.config import CUDAGraphMode
from kerf_runtime.cudagraph.descriptor import BatchDescriptor, DispatchDecision
from kerf_runtime.cudagraph.runner import GraphRunner, named_tensors
from kerf_runtime.errors import CaptureError, CaptureMemoryError
from kerf_runtime.forward_context import set_forward_context
from kerf_runtime.platforms import current_platform
from kerf_runtime.reasons import DispatchReason

MODES = [mode.value for mode in CUDAGraphMode]
LEVELS = [0, 3]

# What WORKLOAD gives in each effective mode: five decode steps, four mixed ones, one of them too large.
EXPECTED = {
    "NONE": {("NONE", "ModeNone"): 9},
    "PIECEWISE": {
        ("PIECEWISE", "Exact"): 4,
        ("PIECEWISE", "Padded"): 4,
        ("NONE", "AboveLargest"): 1,
    },
    "FULL": {("FULL", "Exact"): 4, ("FULL", "Padded"): 4, ("NONE", "AboveLargest"): 1},
    "FULL_DECODE_ONLY": {
        ("FULL", "Exact"): 3,
        ("FULL", "Padded"): 2,
        ("NONE", "ModeNone"): 4,
    },
    "FULL_AND_PIECEWISE": {
        ("FULL", "Exact"): 3,
        ("FULL", "Padded"): 2,
        ("PIECEWISE", "Exact"): 1,
        ("PIECEWISE", "Padded"): 2,
        ("NONE", "AboveLargest"): 1,
    },
}
# Captured graphs: mixed sizes, and decode sizes up to the one that holds all sequences.
CAPTURED = {
    "NONE": (0, 0),
    "PIECEWISE": (5, 0),
    "FULL": (5, 4),
    "FULL_DECODE_ONLY": (0, 4),
    "FULL_AND_PIECEWISE": (5, 4),
}


@pytest.fixture(scope="module")
def shallow():
    """The eager model of level 0."""
    return llama(2)


def buffers_for(loaded):
    return Buffers(loaded, loaded.config.num_kv_heads, loaded.config.head_dim)


def start(level, mode, shallow, **options):
    """Loaded model, effective configuration and an uncaptured runner."""
    spec = make_spec(
        level=level,
        cudagraphMode=mode,
        captureSizes=list(SIZES),
        engine={"maxNumSeqs": MAX_SEQS, "maxNumBatchedTokens": MAX_TOKENS},
    )
    effective = make_effective(spec)
    if level == 0:
        loaded = shallow
        prepared = prepare(loaded, open_cache(None, "none"), spec=spec)
    else:
        loaded, prepared = deep_llama().loaded, warm_deep_llama()
    runner = GraphRunner(prepared, effective, current_platform(), max_num_seqs=MAX_SEQS, **options)
    return loaded, effective, runner


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_results_of_mode_none_and_exact_counters(level, mode, shallow):
    loaded, effective, runner = start(level, mode, shallow)
    pieces = 31 if level == 3 else 0
    mixed, decode = CAPTURED[effective.mode]
    per_mixed = pieces if effective.mode.mixed_mode() is CUDAGraphMode.PIECEWISE else 1
    buffers = buffers_for(loaded)
    with compilation_counter.expect(
        graphs_captured=mixed * per_mixed + decode, graph_replays=0, dynamo_traces=0
    ):
        runner.capture_all(buffers.dummy, lambda *_: None)

    expected = EXPECTED[effective.mode]
    steps_in = Counter()
    for (in_mode, _), count in expected.items():
        steps_in[in_mode] += count
    with compilation_counter.expect(
        graph_replays=steps_in["FULL"] + steps_in["PIECEWISE"] * pieces,
        graphs_captured=0,
        captures_after_startup=0,
        dynamo_traces=0,
        guards_evaluated=0,
        backend_compilations=0,
    ):
        outputs, decisions = play(runner, buffers)

    assert runner.dispatch_totals() == {
        name: steps_in[name] for name in ("FULL", "PIECEWISE", "NONE")
    }
    found = Counter()
    for row in runner.dispatch_detail():
        found[row["mode"], row["reason"]] += row["count"]
    assert found == expected

    loaded, _, plain = start(level, "NONE", shallow)
    references = play_without_graphs(plain, buffers_for(loaded), decisions)
    for output, reference in zip(outputs, references, strict=True):
        assert torch.equal(output, reference)
    unpadded, _ = play(plain, buffers_for(loaded))
    for output, reference in zip(outputs, unpadded, strict=True):
        torch.testing.assert_close(output, reference, rtol=1e-4, atol=1e-4)


def test_the_workload_really_depends_on_the_cache_and_differs_from_step_to_step(shallow):
    loaded, _, plain = start(0, "NONE", shallow)
    outputs, _ = play(plain, buffers_for(loaded))
    fresh = [play(plain, buffers_for(loaded), [step])[0][0] for step in WORKLOAD]
    differs = [not torch.allclose(a, b) for a, b in zip(outputs, fresh, strict=True)]
    # Step 0 and step 5 begin new sequences; every other one continues some.
    assert differs == [False, True, True, True, True, False, True, True, True]


@pytest.mark.parametrize("level", LEVELS)
def test_the_report_has_every_graph_with_nodes_bytes_and_hits(level, shallow):
    loaded, effective, runner = start(level, "FULL_AND_PIECEWISE", shallow)
    assert runner.report()["captured"] == 0
    buffers = buffers_for(loaded)
    runner.capture_all(buffers.dummy, lambda *_: None)
    play(runner, buffers)
    report = runner.report()
    graphs = report["descriptors"]
    assert report["backend"] == "emulated"
    assert report["captured"] == len(graphs) == sum(CAPTURED[effective.mode])
    assert report["memory_bytes"] == sum(graph["bytes"] for graph in graphs) > 0
    assert report["capture_seconds"] >= sum(graph["seconds"] for graph in graphs) > 0
    assert sum(graph["hits"] for graph in graphs) == sum(
        runner.dispatch_totals()[name] for name in ("FULL", "PIECEWISE")
    )
    if level == 3:
        # A piece is one node; a whole forward is 31 pieces and 30 attention calls.
        assert {(g["mode"], g["nodes"]) for g in graphs} == {("PIECEWISE", 31), ("FULL", 61)}
    hits = {(g["mode"], g["num_tokens"], g["uniform_decode"]): g["hits"] for g in graphs}
    assert hits["FULL", 4, True] == 2
    assert hits["FULL", 8, True] == 1


def test_larger_graphs_hold_more_bytes(shallow):
    loaded, _, runner = start(0, "FULL_DECODE_ONLY", shallow)
    runner.capture_all(buffers_for(loaded).dummy, lambda *_: None)
    sizes = [graph["bytes"] for graph in runner.report()["descriptors"]]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(sizes)


def test_progress_follows_the_plan_largest_first(shallow):
    loaded, _, runner = start(0, "FULL_DECODE_ONLY", shallow)
    seen = []
    runner.capture_all(buffers_for(loaded).dummy, lambda *step: seen.append(step))
    assert [text for text, _ in seen] == [f"FULL decode {n}" for n in (8, 4, 2, 1)]
    assert [fraction for _, fraction in seen] == [0, 0.25, 0.5, 0.75]
    assert [d.num_tokens for _, d in runner.plan] == [8, 4, 2, 1]


def test_every_batch_is_warmed_up_before_it_is_captured(shallow):
    calls = []
    hook = shallow.model.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        loaded, _, runner = start(0, "FULL_DECODE_ONLY", shallow, num_warmups=3)
        buffers = buffers_for(loaded)
        runner.capture_all(buffers.dummy, lambda *_: None)
        assert len(calls) == 4 * (3 + 1)
        calls.clear()
        play(runner, buffers, [Step({0: 1}), Step({0: 1}), Step({0: 1})])
        assert calls == []  # a replay never runs the model's Python code
    finally:
        hook.remove()


def test_the_collector_does_not_walk_what_exists_while_graphs_are_captured(shallow):
    frozen = []
    hook = shallow.model.register_forward_pre_hook(lambda *_: frozen.append(gc.get_freeze_count()))
    try:
        loaded, _, runner = start(0, "FULL_DECODE_ONLY", shallow)
        buffers = buffers_for(loaded)
        runner.estimate_memory(buffers.dummy, lambda *_: None)
        runner.capture_all(buffers.dummy, lambda *_: None)
    finally:
        hook.remove()
    assert len(frozen) == 2 * 2 + 2 + 4  # trials and warm-ups; warm-ups and captures
    assert min(frozen) > 10_000
    assert gc.get_freeze_count() == 0


def test_a_decode_batch_is_not_warmed_up_where_a_mixed_one_of_its_size_was(shallow):
    calls = []
    hook = shallow.model.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        loaded, _, runner = start(0, "FULL", shallow, num_warmups=3)
        runner.capture_all(buffers_for(loaded).dummy, lambda *_: None)
    finally:
        hook.remove()
    # Five mixed sizes; of four decode sizes the first, which no decode batch came before.
    assert len(calls) == 5 * (3 + 1) + 1 * (3 + 1) + 3


def test_a_result_stays_at_one_address_and_is_overwritten_by_the_next_replay(shallow):
    loaded, _, runner = start(0, "FULL", shallow)
    buffers = buffers_for(loaded)
    runner.capture_all(buffers.dummy, lambda *_: None)
    hidden = []
    for _ in range(2):
        decision = runner.dispatch(1, True)
        output = runner.run(decision, *buffers.write(Step({0: 1}), decision.descriptor))
        hidden.append(output.hidden)
    assert hidden[0].data_ptr() == hidden[1].data_ptr()


def test_before_capture_every_step_runs_without_a_graph(shallow):
    loaded, _, runner = start(0, "FULL", shallow)
    _, decisions = play(runner, buffers_for(loaded))
    assert {(d.mode.value, d.reason.value) for d in decisions} == {("NONE", "NoGraph")}


def test_running_a_graph_that_was_never_captured_is_an_error_and_counted(shallow):
    loaded, _, runner = start(0, "FULL", shallow)
    buffers = buffers_for(loaded)
    runner.capture_all(buffers.dummy, lambda *_: None)
    descriptor = BatchDescriptor(3, True)
    wrong = DispatchDecision(CUDAGraphMode.FULL, descriptor, DispatchReason.EXACT)
    with (
        compilation_counter.expect(captures_after_startup=1, graphs_captured=0),
        pytest.raises(CaptureError, match="after start-up"),
    ):
        runner.run(wrong, *buffers.dummy(descriptor))


def test_inputs_that_are_not_the_persistent_buffers_are_an_error(shallow):
    loaded, _, runner = start(0, "FULL", shallow)
    buffers = buffers_for(loaded)
    runner.capture_all(buffers.dummy, lambda *_: None)
    decision = runner.dispatch(1, True)
    ids, positions, context = buffers.write(Step({0: 1}), decision.descriptor)
    with pytest.raises(CaptureError, match=r"inputs \[0\] moved"):
        runner.run(decision, ids.clone(), positions, context)


class WaitsForAValue(torch.nn.Module):
    def forward(self, input_ids, positions):
        return input_ids * positions.sum().item()


class Bare:
    """The least that can be captured."""

    def __init__(self, forward):
        self.forward = forward

    def wrap_pieces(self, wrap):
        raise AssertionError("there are no pieces")


def test_a_forward_that_waits_during_capture_is_an_error_that_leaves_no_graph(shallow):
    loaded, effective, _ = start(0, "FULL", shallow)
    model = Bare(WaitsForAValue())
    runner = GraphRunner(model, effective, current_platform(), max_num_seqs=MAX_SEQS)
    buffers = buffers_for(loaded)
    with pytest.raises(CaptureError, match="waits for a value") as raised:
        runner.capture_all(buffers.dummy, lambda *_: None)
    assert f"{__file__}:" in raised.value.where
    assert gc.get_freeze_count() == 0
    assert runner.report()["captured"] == 0
    assert runner.dispatch(1, True).mode is CUDAGraphMode.NONE
    with pytest.raises(CaptureError, match="after start-up"):
        runner.run(
            DispatchDecision(CUDAGraphMode.FULL, BatchDescriptor(1), DispatchReason.EXACT),
            *buffers.dummy(BatchDescriptor(1)),
        )


class CountsItsCalls(torch.nn.Module):
    def __init__(self, in_a_list):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.in_a_list = in_a_list

    def forward(self, input_ids, positions):
        if self.in_a_list:
            torch._foreach_add_([input_ids.clone(), self.calls], 1)
        else:
            self.calls += 1
        return input_ids + positions


@pytest.mark.parametrize("in_a_list", [False, True])
def test_a_forward_that_writes_to_a_buffer_is_refused_before_anything_is_recorded(
    shallow, in_a_list
):
    loaded, effective, _ = start(0, "FULL", shallow)
    model = CountsItsCalls(in_a_list)
    runner = GraphRunner(
        Bare(model),
        effective,
        current_platform(),
        max_num_seqs=MAX_SEQS,
        weights=lambda: named_tensors(model),
    )
    with (
        compilation_counter.expect(graphs_captured=0),
        pytest.raises(CaptureError, match="writes to 'calls'") as raised,
    ):
        runner.capture_all(buffers_for(loaded).dummy, lambda *_: None)
    assert raised.value.where.startswith(f"CountsItsCalls, {__file__}:")
    assert model.calls.item() == 0


def test_weights_that_moved_after_the_capture_are_named(shallow):
    loaded, _, runner = start(0, "FULL", shallow, weights=lambda: named_tensors(model))
    model = loaded.model
    runner.capture_all(buffers_for(loaded).dummy, lambda *_: None)
    runner.check_weights()
    weight = model.norm.weight
    before = weight.data
    try:
        weight.data = before.clone()
        with pytest.raises(CaptureError, match=r"weights moved .*: norm\.weight\. Copy new values"):
            runner.check_weights()
        weight.data = before
        weight.data.copy_(before.clone())
        runner.check_weights()
    finally:
        weight.data = before


def test_pieces_compare_addresses_in_debug_mode_only(shallow):
    for debug in (False, True):
        _, _, runner = start(3, "PIECEWISE", shallow, debug=debug)
        assert {wrapper._check_addresses for wrapper in runner._recorder._pieces} == {debug}


@pytest.mark.parametrize("mode", ["FULL", "FULL_DECODE_ONLY"])
def test_with_copied_inputs_the_caller_may_pass_other_tensors_every_time(mode, shallow):
    spec = make_spec(
        level=0,
        cudagraphMode=mode,
        cudagraphCopyInputs=True,
        captureSizes=list(SIZES),
        engine={"maxNumSeqs": MAX_SEQS, "maxNumBatchedTokens": MAX_TOKENS},
    )
    prepared = prepare(shallow, open_cache(None, "none"), spec=spec)
    runner = GraphRunner(
        prepared,
        make_effective(spec),
        current_platform(),
        max_num_seqs=MAX_SEQS,
        max_tokens=MAX_TOKENS,
        debug=True,
    )
    buffers = buffers_for(shallow)
    runner.capture_all(buffers.dummy, lambda *_: None)
    input_ids, positions, context = buffers.dummy(BatchDescriptor(4, True))
    with compilation_counter.expect(graph_replays=3, graphs_captured=0):
        for _ in range(3):
            decision = runner.dispatch(4, uniform_decode=True)
            hidden = runner.run(decision, input_ids.clone(), positions.clone(), context).hidden
    with torch.inference_mode(), set_forward_context(context):
        expected = prepared.forward(input_ids, positions)
    torch.testing.assert_close(hidden, expected)


@pytest.mark.parametrize("call", [1, 2])
def test_memory_that_runs_out_in_a_warm_up_or_beside_a_graph_names_the_size(shallow, call):
    loaded, _, runner = start(0, "FULL_DECODE_ONLY", shallow, num_warmups=1)
    calls = []

    def run_out(*_):
        calls.append(1)
        if len(calls) == call:
            raise torch.OutOfMemoryError("CUDA out of memory")

    hook = shallow.model.register_forward_pre_hook(run_out)
    doing = {1: "warming up", 2: "capturing"}[call]
    try:
        with pytest.raises(CaptureMemoryError, match=f"while {doing} the graph of 8 tokens"):
            runner.capture_all(buffers_for(loaded).dummy, lambda *_: None)
    finally:
        hook.remove()


def test_in_debug_mode_steps_notice_that_weights_moved(shallow):
    loaded, _, runner = start(0, "FULL", shallow, weights=lambda: named_tensors(model), debug=True)
    model, buffers = loaded.model, buffers_for(loaded)
    runner.capture_all(buffers.dummy, lambda *_: None)
    play(runner, buffers, [Step({0: 1})])
    weight = model.norm.weight
    before = weight.data
    try:
        weight.data = before.clone()
        decision = runner.dispatch(1, True)
        inputs = buffers.dummy(decision.descriptor)
        for _ in range(63):
            runner.run(decision, *inputs)
        with pytest.raises(CaptureError, match=r"weights moved .*: norm\.weight"):
            runner.run(decision, *inputs)
    finally:
        weight.data = before


def changed(context, name):
    """``context`` with a copy in the place of one tensor that a whole forward reads."""
    if name.startswith("keys of "):
        layer = name.removeprefix("keys of ")
        keys, values = context.kv_caches[layer]
        return replace(context, kv_caches={**context.kv_caches, layer: (keys.clone(), values)})
    metadata = context.attention
    return replace(context, attention=replace(metadata, **{name: getattr(metadata, name).clone()}))


@pytest.mark.parametrize(
    "name",
    ["query_start", "seq_lens", "block_table", "slot_mapping", "keys of layers.0.attention"],
)
def test_in_debug_mode_a_whole_graph_notices_that_what_it_reads_beside_its_inputs_moved(
    shallow, name
):
    for debug in (False, True):
        loaded, _, runner = start(0, "FULL", shallow, debug=debug)
        buffers = buffers_for(loaded)
        runner.capture_all(buffers.dummy, lambda *_: None)
        play(runner, buffers, [Step({0: 1})])
        decision = runner.dispatch(1, True)
        ids, positions, context = buffers.write(Step({0: 1}), decision.descriptor)
        wrong = changed(context, name)
        if not debug:
            runner.run(decision, ids, positions, wrong)  # costs nothing, and notices nothing
            continue
        with pytest.raises(CaptureError, match=f"^mode FULL: {name} moved since"):
            runner.run(decision, ids, positions, wrong)
