"""The runner's inputs: persistent addresses, padding, and shapes that depend on the padded size alone."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from kerf_runtime.config.compilation import CUDAGraphMode
from kerf_runtime.cudagraph.descriptor import BatchDescriptor, DispatchDecision
from kerf_runtime.engine.messages import SamplingParams
from kerf_runtime.engine.runner import ModelRunner, Sampling
from kerf_runtime.engine.scheduler import Batch, Scheduler, SchedulerLimits
from kerf_runtime.reasons import DispatchReason

LIMITS = SchedulerLimits(
    max_num_seqs=4,
    max_num_batched_tokens=16,
    max_model_len=32,
    vocab_size=100,
    block_size=4,
    num_blocks=32,
)


def make_runner(*, states: bool = False) -> ModelRunner:
    return ModelRunner(
        nn.Module(),
        LIMITS,
        capture_sizes=(1, 2, 8),
        kv_caches={},
        device=torch.device("cpu"),
        states={"layer": (torch.empty(0), torch.empty(0))} if states else None,
    )


def decision(size: int, *, uniform: bool) -> DispatchDecision:
    return DispatchDecision(
        CUDAGraphMode.NONE, BatchDescriptor(size, uniform), DispatchReason.PADDED
    )


def scheduled(*prompts: int, decoded: int = 0) -> Batch:
    """A batch of prompts of these lengths, after some decode steps."""
    scheduler = Scheduler(LIMITS)
    for number, length in enumerate(prompts):
        prompt = [10 * (number + 1) + i for i in range(length)]
        params = SamplingParams(max_tokens=9)
        scheduler.add(str(number), prompt, params, eos_token_ids=(), seed=0, arrived=0.0)
    batch = scheduler.schedule()
    for _ in range(decoded):
        assert batch is not None
        scheduler.complete(batch, [7] * sum(item.samples for item in batch.items))
        batch = scheduler.schedule()
    assert batch is not None
    return batch


def slots_of(batch: Batch, row: int, start: int, count: int) -> list[int]:
    blocks = batch.items[row].request.blocks
    return [blocks[p // 4] * 4 + p % 4 for p in range(start, start + count)]


def test_a_mixed_batch_is_laid_out_and_padded() -> None:
    batch = scheduled(5, 2)
    ids, positions, context = make_runner().prepare(batch, decision(10, uniform=False))
    assert ids.tolist() == [10, 11, 12, 13, 14, 20, 21, 0, 0, 0]
    assert positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 0, 0, 0]
    metadata = context.attention
    assert metadata is not None
    assert metadata.query_start.tolist() == [0, 5, 7, 7, 7]
    assert metadata.seq_lens.tolist() == [5, 2, 0, 0]
    expected = slots_of(batch, 0, 0, 5) + slots_of(batch, 1, 0, 2) + [-1] * 3
    assert metadata.slot_mapping.tolist() == expected
    assert not metadata.uniform_decode


def test_a_decode_batch_is_padded_with_sequences_of_one_token() -> None:
    batch = scheduled(5, 2, decoded=1)
    ids, positions, context = make_runner().prepare(batch, decision(8, uniform=True))
    assert ids.tolist() == [7, 7, 0, 0, 0, 0, 0, 0]
    assert positions.tolist() == [5, 2, 0, 0, 0, 0, 0, 0]
    metadata = context.attention
    assert metadata is not None
    assert metadata.query_start.tolist() == list(range(9))
    assert metadata.seq_lens.tolist() == [6, 3, 0, 0, 0, 0, 0, 0]
    assert metadata.slot_mapping.tolist() == [
        *slots_of(batch, 0, 5, 1),
        *slots_of(batch, 1, 2, 1),
        *[-1] * 6,
    ]


@pytest.mark.parametrize("uniform", [True, False])
def test_addresses_and_shapes_depend_on_the_descriptor_alone(uniform: bool) -> None:
    runner = make_runner()
    first = runner.make_dummy_batch(BatchDescriptor(8, uniform))
    second = runner.prepare(scheduled(1, 1, 1), decision(8, uniform=uniform))

    def identity(views: tuple[torch.Tensor, torch.Tensor, object]) -> list[object]:
        metadata = views[2].attention  # type: ignore[attr-defined]
        tensors = [*views[:2], metadata.query_start, metadata.seq_lens]
        tensors += [metadata.block_table, metadata.slot_mapping]
        return [(t.data_ptr(), t.shape, t.stride()) for t in tensors]

    assert identity(first) == identity(second)


@pytest.mark.parametrize("uniform", [True, False])
def test_state_slots_are_those_of_the_requests_and_then_that_of_padding(uniform: bool) -> None:
    runner = make_runner(states=True)
    batch = scheduled(5, 2, decoded=1)
    _, _, context = runner.prepare(batch, decision(8, uniform=uniform))
    assert context.attention is not None
    slots = context.attention.state_slots
    assert slots is not None
    assert slots.tolist() == [1, 2, *[0] * (6 if uniform else 2)]
    assert len(slots) == len(context.attention.seq_lens)
    assert context.attention.query_lens == (1, 1)
    assert list(context.states) == ["layer"]


@pytest.mark.parametrize("uniform", [True, False])
def test_a_dummy_batch_has_no_state_but_that_of_padding(uniform: bool) -> None:
    runner = make_runner(states=True)
    runner.prepare(scheduled(5, 2, decoded=1), decision(8, uniform=True))
    _, _, context = runner.make_dummy_batch(BatchDescriptor(8, uniform))
    assert context.attention is not None
    assert context.attention.state_slots is not None
    assert set(context.attention.state_slots.tolist()) == {0}


def test_a_model_without_states_is_told_no_slots() -> None:
    _, _, context = make_runner().prepare(scheduled(5), decision(8, uniform=False))
    assert context.attention is not None
    assert context.attention.state_slots is None


def test_what_an_earlier_larger_step_left_is_not_seen_again() -> None:
    runner = make_runner()
    runner.prepare(scheduled(9, 5), decision(14, uniform=False))
    ids, _, context = runner.prepare(scheduled(2), decision(8, uniform=False))
    assert ids.tolist()[2:] == [0] * 6
    metadata = context.attention
    assert metadata is not None
    assert metadata.seq_lens.tolist() == [2, 0, 0, 0]
    assert metadata.slot_mapping.tolist()[2:] == [-1] * 6


@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize("size", [1, 2, 8])
def test_a_dummy_batch_is_valid(size: int, uniform: bool) -> None:
    ids, positions, context = make_runner().make_dummy_batch(BatchDescriptor(size, uniform))
    metadata = context.attention
    assert metadata is not None
    assert len(ids) == len(positions) == len(metadata.slot_mapping) == size
    assert int(positions.max()) < LIMITS.max_model_len
    # It reads the first block, and stores nothing: requests may be running.
    assert set(metadata.slot_mapping.tolist()) == {-1}
    assert torch.count_nonzero(metadata.block_table) == 0
    lengths = metadata.query_start.diff()
    assert int(lengths.sum()) == size
    assert bool((metadata.seq_lens >= lengths).all())
    assert not uniform or set(lengths.tolist()) == {1}


def test_between_pieces_a_padded_decode_batch_is_still_a_decode_batch() -> None:
    batch = scheduled(5, 2, decoded=1)
    descriptor = BatchDescriptor(8, False)
    piecewise = DispatchDecision(CUDAGraphMode.PIECEWISE, descriptor, DispatchReason.PADDED)
    full = DispatchDecision(CUDAGraphMode.FULL, descriptor, DispatchReason.PADDED)
    runner = make_runner()
    metadata = runner.prepare(batch, piecewise)[2].attention
    assert metadata is not None
    assert metadata.uniform_decode
    assert metadata.query_start.tolist() == list(range(9))
    assert metadata.seq_lens.tolist() == [6, 3, 0, 0, 0, 0, 0, 0]
    # Inside a graph it is what was recorded: a batch of any kind.
    metadata = runner.prepare(batch, full)[2].attention
    assert metadata is not None
    assert not metadata.uniform_decode
    assert metadata.query_start.tolist() == [0, 1, 2, 2, 2]


def test_the_most_new_tokens_of_a_sequence_are_known_on_the_host() -> None:
    runner = make_runner()
    for batch, most in ((scheduled(5, 2), 5), (scheduled(5, 2, decoded=1), 1)):
        metadata = runner.prepare(batch, decision(8, uniform=most == 1))[2].attention
        assert metadata is not None
        assert metadata.max_query_len == most


def test_rows_of_the_block_table_are_sent_only_when_they_changed() -> None:
    runner = make_runner()
    scheduler = Scheduler(LIMITS)
    for number, length in enumerate((5, 3)):
        params = SamplingParams(max_tokens=20)
        prompt = list(range(10, 10 + length))
        scheduler.add(str(number), prompt, params, eos_token_ids=(), seed=0, arrived=0.0)
    sent: list[range] = []
    send = runner._table.send

    def watch() -> range:
        sent.append(send())
        return sent[-1]

    runner._table.send = watch  # type: ignore[method-assign]
    tables = []
    for _ in range(7):
        batch = scheduler.schedule()
        assert batch is not None
        size = batch.num_tokens
        metadata = runner.prepare(batch, decision(size, uniform=batch.uniform_decode))[2].attention
        assert metadata is not None
        tables.append(
            [
                metadata.block_table[row, : len(item.request.blocks)].tolist()
                == item.request.blocks
                for row, item in enumerate(batch.items)
            ]
        )
        scheduler.complete(batch, [7] * sum(item.samples for item in batch.items))
    assert all(all(rows) for rows in tables)
    # Blocks of four tokens: the first sequence needs a new one for its 9th token, the second for its 5th
    # and 9th.
    assert [list(rows) for rows in sent] == [[0, 1], [], [1], [], [0], [], [1]]


def test_a_row_that_another_request_takes_over_is_written_anew() -> None:
    runner = make_runner()
    first = scheduled(9)
    second = scheduled(6, 2)
    for batch in (first, second, first):
        metadata = runner.prepare(batch, decision(12, uniform=False))[2].attention
        assert metadata is not None
        for row, item in enumerate(batch.items):
            blocks = item.request.blocks
            assert metadata.block_table[row, : len(blocks)].tolist() == blocks


@pytest.mark.parametrize("kept", [(0, 1, 2), (1, 2), (0, 2), (2,)])
def test_tokens_of_the_step_before_are_fed_to_the_requests_that_they_belong_to(
    kept: tuple[int, ...],
) -> None:
    runner = make_runner()
    scheduler = Scheduler(LIMITS)
    for number in range(3):
        params = SamplingParams(max_tokens=9)
        scheduler.add(
            str(number), [number + 1], params, eos_token_ids=(), seed=0, arrived=float(number)
        )
    first = scheduler.schedule()
    assert first is not None
    runner.prepare(first, decision(8, uniform=True))
    tokens = torch.tensor([71, 72, 73])
    runner._sampling = Sampling([item.request for item in first.items], tokens)
    for number in {0, 1, 2} - set(kept):
        scheduler.abort(str(number))
    second = scheduler.schedule()
    assert second is not None
    ids, _, _ = runner.prepare(second, decision(8, uniform=True))
    assert ids.tolist() == [71 + number for number in kept] + [0] * (8 - len(kept))


@pytest.mark.parametrize("longest", [2, 3, 8])
def test_a_dummy_batch_of_very_short_sequences_has_room(longest: int) -> None:
    limits = dataclasses.replace(LIMITS, max_model_len=longest)
    runner = ModelRunner(
        nn.Module(), limits, capture_sizes=(8,), kv_caches={}, device=torch.device("cpu")
    )
    for uniform in (False, True):
        ids, _, context = runner.make_dummy_batch(BatchDescriptor(8 if uniform else 16, uniform))
        assert context.attention is not None
        assert int(context.attention.query_start.diff().sum()) == len(ids)
