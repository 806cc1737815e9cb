"""The device side of a step: inputs in persistent buffers, KV cache, logits, sampled tokens.

Recorded graphs remember the addresses they read, so every step writes its inputs into the same buffers
and passes leading views of them.  The number of sequences that the metadata describes depends on the
padded batch size alone, never on the batch: a replayed full graph sees what it saw when recorded.

On a GPU the CPU writes to pinned memory that is sent without waiting.  That memory may be written again
once the step's tokens have been read, which is the only time a step waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from kerf_runtime.config.compilation import CUDAGraphMode
from kerf_runtime.cudagraph.descriptor import BatchDescriptor, DispatchDecision
from kerf_runtime.engine.logprobs import logprobs_of
from kerf_runtime.engine.messages import SamplingParams, TokenLogprobs, TokenOutput
from kerf_runtime.engine.request import Request
from kerf_runtime.engine.sample_row import SampleRow, TokenHistory
from kerf_runtime.engine.sampler import sample
from kerf_runtime.engine.scheduler import Batch, SchedulerLimits
from kerf_runtime.forward_context import AttentionMetadata, ForwardContext

__all__ = ["ComputesLogits", "ModelRunner", "Sampled"]


class ComputesLogits(Protocol):
    """What the runner needs of a model beside its compiled forward."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[R, E] -> float32 [R, vocab]."""


@dataclass(frozen=True)
class Sampled:
    """The tokens of a step, one per item that samples, and log probabilities by request id."""

    tokens: list[int]
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)

    def attach(self, outputs: list[TokenOutput]) -> list[TokenOutput]:
        """The outputs of the step, with the log probabilities that were asked for."""
        if not self.logprobs:
            return outputs
        return [
            output
            if (found := self.logprobs.get(output.request_id)) is None
            else msgspec.structs.replace(output, logprobs=[found])
            for output in outputs
        ]


class _Buffer:
    """A tensor on the device and the array the CPU fills; on the CPU both are the same memory."""

    def __init__(self, *shape: int, dtype: torch.dtype, device: torch.device) -> None:
        self.device = torch.zeros(*shape, dtype=dtype, device=device)
        self._on_cpu = device.type == "cpu"
        staging = self.device if self._on_cpu else torch.zeros(*shape, dtype=dtype, pin_memory=True)
        self._staging = staging
        self.host: np.ndarray = staging.numpy()

    def view(self, rows: int, first: int = 0, last: int | None = None) -> Tensor:
        """The first ``rows`` rows on the device, after what the CPU wrote there has been sent.

        Args:
            rows: of the result.
            first: the first row that is sent.
            last: one past the last row that is sent; ``rows`` if None.
        """
        sent = slice(first, rows if last is None else last)
        if not self._on_cpu and sent.stop > sent.start:
            self.device[sent].copy_(self._staging[sent], non_blocking=True)
        return self.device[:rows]


class ModelRunner:
    """Makes the inputs of steps and turns hidden states into tokens.

    Args:
        model: for its logits.
        limits: of the scheduler.
        capture_sizes: padded batch sizes that may occur, in tokens.
        kv_caches: of every attention layer; they may be replaced before the first graph is captured.
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
        self.kv_caches = kv_caches
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
        self._stale_rows = (sequences, 0)
        """First and one past the last row of the block table that the device does not have yet."""

        self._last = _Buffer(sequences, dtype=torch.int64, device=device)
        self._histories: WeakKeyDictionary[Request, TokenHistory] = WeakKeyDictionary()
        """Of requests with penalties; gone with the request."""
        self._rows: list[tuple[list[int], int] | None] = [None] * sequences
        """Per row of the block table: the request's list of blocks that is written there, and how many."""

    def prepare(
        self, batch: Batch, decision: DispatchDecision
    ) -> tuple[Tensor, Tensor, ForwardContext]:
        """Write a batch into the buffers, padded to the dispatched size.

        Returns:
            Input ids and positions, int64 [T] each, and the forward's context.
        """
        at = 0
        longest = 1
        for row, item in enumerate(batch.items):
            start, count = item.start, item.count
            longest = max(longest, count)
            self._write_blocks(row, item.request.blocks)
            self._input_ids.host[at : at + count] = item.request.tokens[start : start + count]
            self._write_place(row, at, start, count)
            at += count
        # Between pieces attention runs as what the batch is; inside a graph as what was recorded.
        uniform = decision.descriptor.uniform_decode or (
            batch.uniform_decode and decision.mode is CUDAGraphMode.PIECEWISE
        )
        return self._views(decision.descriptor.num_tokens, uniform, at, len(batch.items), longest)

    def _write_blocks(self, row: int, blocks: list[int]) -> None:
        """Bring a row of the block table up to date; a request's list is replaced or grows, no more."""
        written = self._rows[row]
        known = written[1] if written is not None and written[0] is blocks else 0
        if known == len(blocks):
            return
        self._block_table.host[row, known : len(blocks)] = blocks[known:]
        self._rows[row] = (blocks, len(blocks))
        self._stale_rows = (min(self._stale_rows[0], row), max(self._stale_rows[1], row + 1))

    def make_dummy_batch(
        self, descriptor: BatchDescriptor
    ) -> tuple[Tensor, Tensor, ForwardContext]:
        """A realistic batch for recording: decode rows with the longest context, or long prompts.

        Every sequence reads block 0 of the KV cache, and none writes: requests may be running.
        """
        size, longest = descriptor.num_tokens, self._limits.max_model_len
        if self._device.type == "cpu":
            # An emulated graph records calls, not shapes: long contexts would only cost time.
            longest = min(longest, max(size, self._limits.block_size))
        self._input_ids.host[:size] = 0
        self._block_table.host[:] = 0
        self._rows = [None] * len(self._rows)
        self._stale_rows = (0, len(self._rows))
        at, row = 0, 0
        while at < size:
            count = 1 if descriptor.uniform_decode else min(size - at, longest)
            self._write_place(row, at, longest - count if descriptor.uniform_decode else 0, count)
            at, row = at + count, row + 1
        self._slots.host[:size] = -1
        most = 1 if descriptor.uniform_decode else min(size, longest)
        return self._views(size, descriptor.uniform_decode, at, row, most)

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
        self, padded: int, uniform: bool, tokens: int, sequences: int, longest: int
    ) -> tuple[Tensor, Tensor, ForwardContext]:
        self._input_ids.host[tokens:padded] = 0
        self._positions.host[tokens:padded] = 0
        self._slots.host[tokens:padded] = -1
        if uniform:
            rows = padded
            self._query_start.host[: rows + 1] = np.arange(rows + 1)
        else:
            rows = max(min(padded, self._limits.max_num_seqs), sequences)
            self._query_start.host[sequences : rows + 1] = tokens
        self._seq_lens.host[sequences:rows] = 0
        metadata = AttentionMetadata(
            query_start=self._query_start.view(rows + 1),
            seq_lens=self._seq_lens.view(rows),
            block_table=self._view_blocks(rows),
            slot_mapping=self._slots.view(padded),
            uniform_decode=uniform,
            max_query_len=longest,
        )
        context = ForwardContext(attention=metadata, kv_caches=self.kv_caches)
        return self._input_ids.view(padded), self._positions.view(padded), context

    def _view_blocks(self, rows: int) -> Tensor:
        """The first rows of the block table; only rows that changed are sent to the device."""
        first, last = self._stale_rows
        self._stale_rows = (len(self._rows), 0)
        return self._block_table.view(rows, first, last)

    @torch.inference_mode()
    def sample(self, batch: Batch, hidden: Tensor) -> Sampled:
        """The next token of every item that samples, in order.

        Args:
            batch: that ran.
            hidden: [T, E], its hidden states, padding included.
        """
        last: list[int] = []
        requests: list[Request] = []
        at = 0
        for item in batch.items:
            at += item.count
            if item.samples:
                last.append(at - 1)
                requests.append(item.request)
        if not requests:
            return Sampled([])
        rows = [self._sample_row(request) for request in requests]
        self._last.host[: len(last)] = last
        logits = self._model.compute_logits(hidden[self._last.view(len(last))])
        tokens = sample(logits, rows)
        found = zip(requests, logprobs_of(logits, rows, tokens), strict=True)
        return Sampled(tokens, {r.request_id: entry for r, entry in found if entry is not None})

    def _sample_row(self, request: Request) -> SampleRow:
        history = None
        if request.params.has_penalties:
            history = self._histories.get(request)
            if history is None:
                history = TokenHistory(request.tokens[: request.prompt_length])
                self._histories[request] = history
            history.follow(request.tokens)
        return SampleRow(request.params, request.seed, request.generated, history, request.stop_ids)

    @torch.inference_mode()
    def warm_up_sampling(self, hidden: Tensor) -> None:
        """Compute and sample logits once, every way there is.

        Args:
            hidden: [R, E], one row per sequence.
        """
        logits = self._model.compute_logits(hidden)
        for params in (
            SamplingParams(max_tokens=1),
            SamplingParams(max_tokens=1, temperature=1.0),
            SamplingParams(max_tokens=1, temperature=1.0, top_k=1, top_p=0.5),
            SamplingParams(
                max_tokens=1,
                min_tokens=1,
                repetition_penalty=1.1,
                logit_bias=((0, 1.0),),
                logprobs=1,
            ),
        ):
            row = SampleRow(params, 0, 0, TokenHistory([0]), frozenset((0,)))
            rows = [row] * len(logits)
            logprobs_of(logits, rows, sample(logits, rows))
