"""Graphs above ``graphMemoryBudget`` are dropped after their bytes were measured, and what is left is served."""

from __future__ import annotations

import logging

import pytest
import torch
from tests.compilation.helpers import make_effective, make_spec, open_cache, prepare
from tests.compilation.models import llama
from tests.cudagraph.steps import MAX_SEQS, MAX_TOKENS, SIZES, WORKLOAD, Buffers, play

from kerf_runtime.compilation.counters import compilation_counter
from kerf_runtime.config import CUDAGraphMode
from kerf_runtime.cudagraph.runner import GraphRunner
from kerf_runtime.platforms import current_platform

DECODE = [8, 4, 2, 1]
"""Decode graphs of the workload, in the order of their capture."""


@pytest.fixture(scope="module")
def loaded():
    return llama(2)


def captured(loaded, mode, budget=None, level=0, sizes=SIZES):
    """A runner that has captured within ``budget`` bytes, and its buffers."""
    more = {} if budget is None else {"graphMemoryBudget": str(budget)}
    spec = make_spec(
        level=level,
        backend="eager",
        inductorConfig={},
        cudagraphMode=mode,
        captureSizes=list(sizes),
        engine={"maxNumSeqs": MAX_SEQS, "maxNumBatchedTokens": MAX_TOKENS},
        **more,
    )
    prepared = prepare(loaded, open_cache(None, "none"), spec=spec)
    runner = GraphRunner(prepared, make_effective(spec), current_platform(), max_num_seqs=MAX_SEQS)
    buffers = Buffers(loaded, loaded.config.num_kv_heads, loaded.config.head_dim)
    runner.capture_all(buffers.dummy, lambda *_: None)
    return runner, buffers


@pytest.fixture(scope="module")
def decode_bytes(loaded):
    """Bytes of every decode graph by its size, without a budget."""
    runner, _ = captured(loaded, "FULL_DECODE_ONLY")
    report = runner.report()
    assert report["dropped"] == []
    assert report["memory_budget_bytes"] is None
    assert runner.changes == ()
    return {graph["num_tokens"]: graph["bytes"] for graph in report["descriptors"]}


def test_the_costliest_graphs_go_until_the_measured_memory_fits(loaded, decode_bytes):
    budget = sum(decode_bytes.values()) - decode_bytes[8]
    with compilation_counter.expect(graphs_captured=4):
        runner, _ = captured(loaded, "FULL_DECODE_ONLY", budget)
    report = runner.report()
    assert [graph["num_tokens"] for graph in report["descriptors"]] == [4, 2, 1]
    assert report["captured"] == 3
    assert report["memory_bytes"] <= report["memory_budget_bytes"] == budget
    assert report["dropped"] == [
        {
            "mode": "FULL",
            "num_tokens": 8,
            "uniform_decode": True,
            "bytes": decode_bytes[8],
            "reason": "MemoryBudget",
        }
    ]
    assert [descriptor.num_tokens for _, descriptor in runner.plan] == [4, 2, 1]
    assert runner.capture_sizes == (1, 2, 4)


def test_a_smaller_graph_that_few_batches_need_goes_before_a_larger_one(loaded):
    sizes = (3, 4, 8)  # 4 is for batches of 4 alone, 8 for those of 5 to 8
    everything = captured(loaded, "FULL_DECODE_ONLY", sizes=sizes)[0].report()["descriptors"]
    size = {graph["num_tokens"]: graph["bytes"] for graph in everything}
    budget = sum(size.values()) - size[4]
    report = captured(loaded, "FULL_DECODE_ONLY", budget, sizes=sizes)[0].report()
    assert [graph["num_tokens"] for graph in report["dropped"]] == [4]


def test_a_budget_that_everything_fits_drops_nothing(loaded, decode_bytes):
    with compilation_counter.expect(graphs_captured=4):
        runner, _ = captured(loaded, "FULL_DECODE_ONLY", sum(decode_bytes.values()))
    assert runner.report()["dropped"] == []
    assert runner.changes == ()


@pytest.mark.parametrize("mode", ["FULL", "FULL_DECODE_ONLY"])
@pytest.mark.parametrize("part", [0, 0.2, 0.5, 0.9])
def test_whatever_the_budget_is_the_memory_of_all_graphs_is_within_it(loaded, mode, part):
    everything = captured(loaded, mode)[0].report()
    budget = int(everything["memory_bytes"] * part)
    report = captured(loaded, mode, budget)[0].report()
    assert report["memory_bytes"] <= budget
    assert report["captured"] + len(report["dropped"]) == everything["captured"]
    assert report["dropped"]


def test_batches_of_dropped_graphs_run_in_the_others_or_in_none_with_the_same_results(
    loaded, decode_bytes
):
    budget = sum(decode_bytes.values()) - decode_bytes[8]
    runner, buffers = captured(loaded, "FULL_DECODE_ONLY", budget)
    # Five decode steps of 3, 1, 4, 6 and 2 sequences: the one of 6 had the graph that was dropped.
    with compilation_counter.expect(graph_replays=4, graphs_captured=0, captures_after_startup=0):
        outputs, _ = play(runner, buffers)
    steps = {
        (row["mode"], row["size"], row["reason"]): row["count"] for row in runner.dispatch_detail()
    }
    assert steps == {
        ("FULL", 1, "Exact"): 1,
        ("FULL", 2, "Exact"): 1,
        ("FULL", 4, "Exact"): 1,
        ("FULL", 4, "Padded"): 1,
        ("NONE", 0, "AboveLargest"): 1,
        ("NONE", 0, "ModeNone"): 4,
    }
    references, _ = play(*captured(loaded, "NONE"))
    for output, reference in zip(outputs, references, strict=True):
        torch.testing.assert_close(output, reference, rtol=1e-4, atol=1e-4)


def test_a_budget_that_no_graph_fits_leaves_mode_none_and_says_so(loaded, caplog):
    with caplog.at_level(logging.WARNING, logger="kerf_runtime.cudagraph.runner"):
        runner, buffers = captured(loaded, "FULL_DECODE_ONLY", 1)
    assert runner.mode is CUDAGraphMode.NONE
    assert runner.capture_sizes == ()
    report = runner.report()
    assert (report["captured"], report["memory_bytes"]) == (0, 0)
    assert [graph["num_tokens"] for graph in report["dropped"]] == DECODE
    assert [(change.field, change.effective) for change in runner.changes] == [
        ("captureSizes", "0 graphs"),
        ("cudagraphMode", "NONE"),
    ]
    [message] = [record.getMessage() for record in caplog.records]
    assert message.startswith("dropped 4 graphs (MemoryBudget): all 4 need ")
    assert message.endswith(" bytes, graphMemoryBudget is 1")
    play(runner, buffers)
    assert runner.dispatch_detail() == [
        {"mode": "NONE", "size": 0, "reason": "ModeNone", "count": len(WORKLOAD)}
    ]


def test_pieces_and_whole_forwards_are_dropped_alike_and_never_captured_while_serving():
    everything = captured(llama(2), "FULL_AND_PIECEWISE", level=3)[0].report()["descriptors"]
    size = {(graph["mode"], graph["num_tokens"]): graph["bytes"] for graph in everything}
    costly = [("PIECEWISE", 16), ("PIECEWISE", 8), ("FULL", 8)]
    assert sorted(size, key=lambda key: (size[key], key), reverse=True)[:3] == costly

    budget = sum(size.values()) - sum(size[key] for key in costly)
    runner, buffers = captured(llama(2), "FULL_AND_PIECEWISE", budget, level=3)
    report = runner.report()
    assert [(d["mode"], d["num_tokens"]) for d in report["dropped"]] == costly
    assert report["memory_bytes"] <= budget
    assert runner.mode is CUDAGraphMode.FULL_AND_PIECEWISE
    with compilation_counter.expect(graph_replays=4 + 3, captures_after_startup=0):
        play(runner, buffers)
    # Of four mixed batches one fits a graph, of three pieces; of five decode batches all but the largest.
    assert {
        (row["mode"], row["size"], row["reason"]): row["count"] for row in runner.dispatch_detail()
    } == {
        ("FULL", 1, "Exact"): 1,
        ("FULL", 2, "Exact"): 1,
        ("FULL", 4, "Exact"): 1,
        ("FULL", 4, "Padded"): 1,
        ("PIECEWISE", 4, "Padded"): 1,
        ("NONE", 0, "AboveLargest"): 4,
    }
