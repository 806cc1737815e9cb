"""Logits and the likeliest tokens come out of full graphs of decode batches, and out of no others."""

from __future__ import annotations

import pytest
import torch
from tests.compilation.helpers import make_effective, make_spec, open_cache, prepare
from tests.compilation.models import llama
from tests.cudagraph.steps import MAX_SEQS, MAX_TOKENS, SIZES, WORKLOAD, Buffers

from kerf_runtime.config import CUDAGraphMode
from kerf_runtime.cudagraph import decode_head
from kerf_runtime.cudagraph.decode_head import DecodeHead
from kerf_runtime.cudagraph.descriptor import BatchDescriptor
from kerf_runtime.cudagraph.runner import GraphRunner
from kerf_runtime.platforms import current_platform

CPU = torch.device("cpu")


def nothing(hidden):
    raise AssertionError("not called")


@pytest.mark.parametrize(
    ("vocab_size", "dtype", "largest", "rows"),
    [
        (128256, torch.bfloat16, 512, 65),
        (128256, torch.float32, 512, 32),
        (50272, torch.bfloat16, 64, 64),
        (2**24, torch.float32, 64, 0),
    ],
)
def test_logits_of_a_graph_take_at_most_16_mebibytes(vocab_size, dtype, largest, rows):
    head = DecodeHead(nothing, vocab_size=vocab_size, dtype=dtype, largest=largest, device=CPU)
    assert head.rows == rows


class Counted:
    """Logits of a model, and how often they were asked for."""

    def __init__(self, model):
        self._model = model
        self.calls = []

    def __call__(self, hidden):
        self.calls.append(len(hidden))
        return self._model.compute_logits(hidden)


@pytest.fixture(scope="module")
def loaded():
    return llama(2)


@pytest.fixture
def rig(loaded, monkeypatch):
    """Make a runner with a head for batches of at most ``rows``; returns it with buffers and the logits' counter."""

    def make(mode, rows=MAX_SEQS + 2):
        limit = rows * loaded.config.vocab_size * torch.float32.itemsize
        monkeypatch.setattr(decode_head, "LOGITS_BYTES", limit)
        spec = make_spec(
            level=0,
            cudagraphMode=mode,
            captureSizes=list(SIZES),
            engine={"maxNumSeqs": MAX_SEQS, "maxNumBatchedTokens": MAX_TOKENS},
        )
        logits = Counted(loaded.model)
        runner = GraphRunner(
            prepare(loaded, open_cache(None, "none"), spec=spec),
            make_effective(spec),
            current_platform(),
            max_num_seqs=MAX_SEQS,
            head=DecodeHead(
                logits,
                vocab_size=loaded.config.vocab_size,
                dtype=torch.float32,
                largest=max(SIZES),
                device=CPU,
            ),
        )
        return runner, Buffers(loaded, loaded.config.num_kv_heads, loaded.config.head_dim), logits

    return make


@pytest.mark.parametrize("mode", ["FULL", "FULL_DECODE_ONLY"])
def test_every_decode_step_brings_its_logits_and_tokens_without_a_call(rig, loaded, mode):
    runner, buffers, logits = rig(mode)
    runner.capture_all(buffers.dummy, lambda *_: None)
    logits.calls.clear()
    decoded = 0
    for step in WORKLOAD:
        decision = runner.dispatch(step.tokens, step.uniform)
        output = runner.run(decision, *buffers.write(step, decision.descriptor))
        in_graph = decision.mode is CUDAGraphMode.FULL and decision.descriptor.uniform_decode
        assert (output.decoded is not None) is in_graph
        if output.decoded is not None:
            decoded += 1
            with torch.inference_mode():
                expected = loaded.model.compute_logits(output.hidden)
            torch.testing.assert_close(output.decoded.logits, expected)
            assert torch.equal(output.decoded.likeliest, expected.argmax(-1))
    assert logits.calls == []
    assert decoded == 5


def test_graphs_above_the_limit_have_no_logits_and_the_report_tells_which_have(rig):
    runner, buffers, _ = rig("FULL", rows=3)
    runner.capture_all(buffers.dummy, lambda *_: None)
    told = [
        (graph["uniform_decode"], graph["num_tokens"])
        for graph in runner.report()["descriptors"]
        if graph["logits"]
    ]
    assert sorted(told) == [(True, 1), (True, 2)]
    for size in (1, 2, 4, 8):
        descriptor = BatchDescriptor(size, True)
        output = runner.run(runner.dispatch(size, True), *buffers.dummy(descriptor))
        assert (output.decoded is not None) is (size <= 2)


def test_tokens_stay_where_they_are_until_the_next_decode_step(rig):
    runner, buffers, _ = rig("FULL_DECODE_ONLY")
    runner.capture_all(buffers.dummy, lambda *_: None)
    places, tokens = set(), None
    for size in (4, 2, 1):
        output = runner.run(
            runner.dispatch(size, True), *buffers.dummy(BatchDescriptor(size, True))
        )
        places.add(output.decoded.likeliest.data_ptr())
        tokens = output.decoded.likeliest
    assert len(places) == 1
    before = tokens.clone()
    tokens.fill_(-1)
    mixed = runner.dispatch(3, False)
    runner.run(mixed, *buffers.dummy(mixed.descriptor))
    assert tokens.item() == -1
    runner.run(runner.dispatch(1, True), *buffers.dummy(BatchDescriptor(1, True)))
    assert torch.equal(tokens, before)


def test_warming_up_uses_the_head_for_every_size_that_it_is_recorded_with(rig):
    runner, buffers, logits = rig("FULL", rows=4)
    warmed = []
    tokens = DecodeHead.warm_up

    def note(head, hidden):
        warmed.append(len(hidden))
        tokens(head, hidden)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecodeHead, "warm_up", note)
        runner.capture_all(buffers.dummy, lambda *_: None)
    # Of the decode sizes the first is warmed up, which no decode batch came before.
    assert warmed == [16, 8, 4, 2, 1, 8]
    # While a warm-up, and while a recording; sizes above the limit in neither.
    assert sorted(logits.calls) == [1, 1, 2, 2, 4, 4]


def test_a_warm_up_between_steps_leaves_the_tokens_of_the_step_before(loaded):
    head = DecodeHead(
        loaded.model.compute_logits,
        vocab_size=loaded.config.vocab_size,
        dtype=torch.float32,
        largest=4,
        device=CPU,
    )
    with torch.inference_mode():
        hidden = torch.randn(2, loaded.config.hidden_size)
        likeliest = head(hidden).likeliest
        likeliest.fill_(-1)
        head.warm_up(hidden)
    assert likeliest.tolist() == [-1, -1]
