"""The device side of a step: inputs in persistent buffers, KV cache, logits, sampled tokens.

Recorded graphs remember the addresses they read, so every step writes its inputs into the same buffers
and passes leading views of them.  The number of sequences that the metadata describes depends on the
padded batch size alone, never on the batch: a replayed full graph sees what it saw when recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn

from kerf_runtime.cudagraph.descriptor import BatchDescriptor, DispatchDecision
from kerf_runtime.engine.messages import SamplingParams
from kerf_runtime.engine.sampler import SampleRow, sample
from kerf_runtime.engine.scheduler import Batch, SchedulerLimits
from kerf_runtime.forward_context import AttentionMetadata, ForwardContext

__all__ = ["ComputesLogits", "ModelRunner"]


class ComputesLogits(Protocol):
    """What the runner needs of a model beside its compiled forward."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[R, E] -> float32 [R, vocab]."""


class _Buffer:
    """A tensor on the device and the array the CPU fills; on the CPU both are the same memory."""

    def __init__(self, *shape: int, dtype: torch.dtype, device: torch.device) -> None:
        self.device = torch.zeros(*shape, dtype=dtype, device=device)
        self._on_cpu = device.type == "cpu"
        staging = self.device if self._on_cpu else torch.zeros(*shape, dtype=dtype, pin_memory=True)
        self._staging = staging
        self.host: np.ndarray = staging.numpy()

    def view(self, rows: int) -> Tensor:
        """The first ``rows`` rows on the device, after what the CPU wrote there has been sent."""
        if not self._on_cpu:
            self.device[:rows].copy_(self._staging[:rows], non_blocking=True)
        return self.device[:rows]


class ModelRunner:
    """Makes the inputs of steps and turns hidden states into tokens.

    Args:
        model: for its logits.
        limits: of the scheduler.
        capture_sizes: padded batch sizes that may occur, in tokens.
        kv_caches: of every attention layer.
        device: where the model is.
    """

    def __init__(
        self,
        model: nn.Module,
        limits: SchedulerLimits,
        *,
        capture_sizes: Sequence[int],
        kv_caches: Mapping[str, tuple[Tensor, Tensor]],
        device: torch.device,
    ) -> None:
        self._model = cast(ComputesLogits, model)
        self._limits = limits
        self._kv_caches = kv_caches
        self._device = device
        largest = max(capture_sizes, default=0)
        tokens = max(limits.max_num_batched_tokens, largest)
        # A decode batch is padded with sequences too, up to the largest captured size.
        sequences = max(limits.max_num_seqs, largest)
        columns = -(-limits.max_model_len // limits.block_size)
        self._input_ids = _Buffer(tokens, dtype=torch.int64, device=device)
        self._positions = _Buffer(tokens, dtype=torch.int64, device=device)
        self._slots = _Buffer(tokens, dtype=torch.int64, device=device)
        self._query_start = _Buffer(sequences + 1, dtype=torch.int32, device=device)
        self._seq_lens = _Buffer(sequences, dtype=torch.int32, device=device)
        self._block_table = _Buffer(sequences, columns, dtype=torch.int32, device=device)

    def prepare(
        self, batch: Batch, decision: DispatchDecision
    ) -> tuple[Tensor, Tensor, ForwardContext]:
        """Write a batch into the buffers, padded to the dispatched size.

        Returns:
            Input ids and positions, int64 [T] each, and the forward's context.
        """
        at = 0
        for row, item in enumerate(batch.items):
            start, count, blocks = item.start, item.count, item.request.blocks
            self._block_table.host[row, : len(blocks)] = blocks
            self._input_ids.host[at : at + count] = item.request.tokens[start : start + count]
            self._write_place(row, at, start, count)
            at += count
        return self._views(decision.descriptor, at, len(batch.items))

    def make_dummy_batch(
        self, descriptor: BatchDescriptor
    ) -> tuple[Tensor, Tensor, ForwardContext]:
        """A realistic batch for recording: decode rows with the longest context, or long prompts.

        It writes to block 0 of the KV cache, so it must not be used once requests run.
        """
        size, longest = descriptor.num_tokens, self._limits.max_model_len
        if self._device.type == "cpu":
            # An emulated graph records calls, not shapes: long contexts would only cost time.
            longest = min(longest, max(size, self._limits.block_size))
        self._input_ids.host[:size] = 0
        self._block_table.host[:] = 0
        at, row = 0, 0
        while at < size:
            count = 1 if descriptor.uniform_decode else min(size - at, longest)
            self._write_place(row, at, longest - count if descriptor.uniform_decode else 0, count)
            at, row = at + count, row + 1
        return self._views(descriptor, at, row)

    def _write_place(self, row: int, at: int, start: int, count: int) -> None:
        """Where ``count`` tokens of sequence ``row``, at batch index ``at``, stand and are cached."""
        size = self._limits.block_size
        positions = np.arange(start, start + count)
        self._positions.host[at : at + count] = positions
        blocks = self._block_table.host[row, positions // size].astype(np.int64)
        self._slots.host[at : at + count] = blocks * size + positions % size
        self._query_start.host[row] = at
        self._seq_lens.host[row] = start + count

    def _views(
        self, descriptor: BatchDescriptor, tokens: int, sequences: int
    ) -> tuple[Tensor, Tensor, ForwardContext]:
        padded = descriptor.num_tokens
        self._input_ids.host[tokens:padded] = 0
        self._positions.host[tokens:padded] = 0
        self._slots.host[tokens:padded] = -1
        if descriptor.uniform_decode:
            rows = padded
            self._query_start.host[: rows + 1] = np.arange(rows + 1)
        else:
            rows = max(min(padded, self._limits.max_num_seqs), sequences)
            self._query_start.host[sequences : rows + 1] = tokens
        self._seq_lens.host[sequences:rows] = 0
        metadata = AttentionMetadata(
            query_start=self._query_start.view(rows + 1),
            seq_lens=self._seq_lens.view(rows),
            block_table=self._block_table.view(rows),
            slot_mapping=self._slots.view(padded),
            uniform_decode=descriptor.uniform_decode,
        )
        context = ForwardContext(attention=metadata, kv_caches=self._kv_caches)
        return self._input_ids.view(padded), self._positions.view(padded), context

    @torch.inference_mode()
    def sample(self, batch: Batch, hidden: Tensor) -> list[int]:
        """The next token of every item that samples, in order.

        Args:
            batch: that ran.
            hidden: [T, E], its hidden states, padding included.
        """
        last: list[int] = []
        rows: list[SampleRow] = []
        at = 0
        for item in batch.items:
            at += item.count
            if item.samples:
                last.append(at - 1)
                request = item.request
                rows.append(SampleRow(request.params, request.seed, request.generated))
        if not rows:
            return []
        index = torch.tensor(last, device=self._device)
        return sample(self._model.compute_logits(hidden[index]), rows)

    @torch.inference_mode()
    def warm_up_sampling(self, hidden: Tensor) -> None:
        """Compute and sample logits of the first row once, every way there is."""
        logits = self._model.compute_logits(hidden[:1])
        for params in (
            SamplingParams(max_tokens=1),
            SamplingParams(max_tokens=1, temperature=1.0),
            SamplingParams(max_tokens=1, temperature=1.0, top_k=1, top_p=0.5),
        ):
            sample(logits, [SampleRow(params, seed=0, step=0)])
