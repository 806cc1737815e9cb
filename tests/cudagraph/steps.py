"""A small engine for the tests of the graph runner: persistent buffers, a paged cache, a fixed workload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kerf_runtime.config import CUDAGraphMode
from kerf_runtime.cudagraph.descriptor import BatchDescriptor, DispatchDecision
from kerf_runtime.cudagraph.runner import GraphRunner
from kerf_runtime.forward_context import AttentionMetadata, ForwardContext
from kerf_runtime.models.loader import LoadedModel

SIZES = (1, 2, 4, 8, 16)
MAX_SEQS = 6
MAX_TOKENS = 24
BLOCK = 4
BLOCKS_PER_SEQUENCE = 8


@dataclass(frozen=True)
class Step:
    """One batch: sequence -> number of its tokens, in this order."""

    counts: dict[int, int]

    @property
    def tokens(self) -> int:
        return sum(self.counts.values())

    @property
    def uniform(self) -> bool:
        return all(count == 1 for count in self.counts.values())


WORKLOAD = (
    Step({0: 5, 1: 3, 2: 2}),  # 10 tokens, padded to 16
    Step({0: 1, 1: 1, 2: 1}),  # decode of 3, padded to 4
    Step({0: 1}),  # decode of 1, exact
    Step({3: 7, 0: 1}),  # 8 mixed tokens, exact
    Step({0: 1, 1: 1, 2: 1, 3: 1}),  # decode of 4, exact
    Step({4: 12, 5: 8}),  # 20 tokens, above the largest size
    Step(dict.fromkeys(range(6), 1)),  # decode of 6, padded to 8
    Step({2: 1, 4: 1}),  # decode of 2, exact
    Step({1: 3}),  # 3 mixed tokens, padded to 4
)


class Buffers:
    """What an engine keeps between steps: inputs at fixed addresses and the cache of every layer."""

    def __init__(self, loaded: LoadedModel, num_kv_heads: int, head_dim: int) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype)

        self.input_ids = zeros(MAX_TOKENS, dtype=torch.int64)
        self.positions = zeros(MAX_TOKENS, dtype=torch.int64)
        self.slots = zeros(MAX_TOKENS, dtype=torch.int64)
        self.query_start = zeros(MAX_TOKENS + 1)
        self.seq_lens = zeros(MAX_TOKENS)
        self.block_table = zeros(MAX_TOKENS, BLOCKS_PER_SEQUENCE)
        shape = (MAX_SEQS * BLOCKS_PER_SEQUENCE, BLOCK, num_kv_heads, head_dim)
        self.kv_caches = {
            n: (torch.zeros(shape), torch.zeros(shape)) for n in loaded.attention_layers
        }
        self.lengths = [0] * MAX_SEQS

    def dummy(self, descriptor: BatchDescriptor) -> tuple[Tensor, Tensor, ForwardContext]:
        """A batch for capture that stores nothing: every sequence sees one cached token."""
        tokens = descriptor.num_tokens
        counts = [1] * tokens if descriptor.uniform_decode else [tokens]
        self.input_ids.fill_(0)
        self.positions.fill_(0)
        self.slots.fill_(-1)
        self.block_table.fill_(0)
        return self._views(descriptor, counts, list(counts))

    def write(
        self, step: Step, descriptor: BatchDescriptor
    ) -> tuple[Tensor, Tensor, ForwardContext]:
        """Write a step into the buffers, padded to ``descriptor``, and advance its sequences."""
        at = 0
        self.slots.fill_(-1)
        for row, (sequence, count) in enumerate(step.counts.items()):
            start = self.lengths[sequence]
            places = torch.arange(start, start + count)
            first_block = sequence * BLOCKS_PER_SEQUENCE
            self.block_table[row] = torch.arange(first_block, first_block + BLOCKS_PER_SEQUENCE)
            self.input_ids[at : at + count] = (places * 7 + sequence * 13 + 3) % 64
            self.positions[at : at + count] = places
            self.slots[at : at + count] = first_block * BLOCK + places
            self.lengths[sequence] += count
            at += count
        self.input_ids[at:] = 0
        self.positions[at:] = 0
        lengths = [self.lengths[sequence] for sequence in step.counts]
        return self._views(descriptor, list(step.counts.values()), lengths)

    def _views(
        self, descriptor: BatchDescriptor, counts: Sequence[int], lengths: Sequence[int]
    ) -> tuple[Tensor, Tensor, ForwardContext]:
        padded, sequences = descriptor.num_tokens, len(counts)
        rows = padded if descriptor.uniform_decode else MAX_SEQS
        starts = torch.tensor([0, *counts]).cumsum(0)
        self.query_start[: sequences + 1] = starts
        if descriptor.uniform_decode:
            self.query_start[: rows + 1] = torch.arange(rows + 1)
        else:
            self.query_start[sequences : rows + 1] = starts[-1]
        self.seq_lens.zero_()
        self.seq_lens[:sequences] = torch.tensor(lengths)
        metadata = AttentionMetadata(
            query_start=self.query_start[: rows + 1],
            seq_lens=self.seq_lens[:rows],
            block_table=self.block_table[:rows],
            slot_mapping=self.slots[:padded],
            uniform_decode=descriptor.uniform_decode,
        )
        context = ForwardContext(attention=metadata, kv_caches=self.kv_caches)
        return self.input_ids[:padded], self.positions[:padded], context


def play(
    runner: GraphRunner, buffers: Buffers, workload: Sequence[Step] = WORKLOAD
) -> tuple[list[Tensor], list[DispatchDecision]]:
    """Run ``workload``; returns the hidden states of the real tokens of each step and the decisions."""
    outputs, decisions = [], []
    for step in workload:
        decision = runner.dispatch(step.tokens, step.uniform)
        decisions.append(decision)
        hidden = runner.run(decision, *buffers.write(step, decision.descriptor)).hidden
        outputs.append(hidden[: step.tokens].clone())
    return outputs, decisions


def play_without_graphs(
    runner: GraphRunner,
    buffers: Buffers,
    decisions: Sequence[DispatchDecision],
    workload: Sequence[Step] = WORKLOAD,
) -> list[Tensor]:
    """The same padded batches as ``decisions`` say, in mode NONE."""
    outputs = []
    for step, decision in zip(workload, decisions, strict=True):
        plain = replace(decision, mode=CUDAGraphMode.NONE)
        hidden = runner.run(plain, *buffers.write(step, plain.descriptor)).hidden
        outputs.append(hidden[: step.tokens].clone())
    return outputs
