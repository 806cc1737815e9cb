"""The device side of a step: inputs in persistent buffers, KV cache, logits, sampled tokens.

Recorded graphs remember the addresses they read, so every step writes its inputs into the same buffers
and passes leading views of them.  The number of sequences that the metadata describes depends on the
padded batch size alone, never on the batch: a replayed full graph sees what it saw when recorded.

On a GPU nothing here waits for the device: values are sent and tokens fetched through pinned memory, and
a step may be enqueued while the one before runs.  Its tokens are then fed to this one on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol, cast
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from kerf_runtime.config.compilation import CUDAGraphMode
from kerf_runtime.cudagraph.descriptor import BatchDescriptor, DispatchDecision
from kerf_runtime.engine.buffers import StepBuffer
from kerf_runtime.engine.logprobs import Logprobs, logprobs_of
from kerf_runtime.engine.messages import SamplingParams, TokenLogprobs, TokenOutput
from kerf_runtime.engine.prompt_logprobs import PromptLogprobs, PromptReading
from kerf_runtime.engine.request import Request
from kerf_runtime.engine.sample_row import SampleRow, TokenHistory
from kerf_runtime.engine.sampler import sample
from kerf_runtime.engine.scheduler import Batch, SchedulerLimits
from kerf_runtime.engine.state_cache import PADDING_SLOT
from kerf_runtime.engine.transfer import Received
from kerf_runtime.forward_context import AttentionMetadata, ForwardContext

__all__ = ["ComputesLogits", "ModelRunner", "Sampled", "Sampling"]


class ComputesLogits(Protocol):
    """What the runner needs of a model beside its compiled forward."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[R, E] -> float32 [R, vocab]."""


@dataclass(frozen=True)
class Sampled:
    """The tokens of a step, one per item that samples; log probabilities and those of prompts by request id."""

    tokens: list[int]
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    prompts: dict[str, list[TokenLogprobs | None]] = field(default_factory=dict)

    def attach(self, outputs: list[TokenOutput]) -> list[TokenOutput]:
        """The outputs of the step, with the log probabilities that were asked for."""
        if not self.logprobs:
            return outputs
        return [
            output
            if (found := self.logprobs.get(output.request_id)) is None
            else msgspec.structs.replace(
                output, logprobs=[found], prompt_logprobs=self.prompts.get(output.request_id)
            )
            for output in outputs
        ]


class Sampling:
    """Tokens that the device is computing.

    Args:
        requests: that sample, in the order of the batch.
        tokens: int64 [R] on the device; None without a request.
        logprobs: of these tokens, if asked for.
        prompts: what is told about prompts that are complete, by request id.
    """

    def __init__(
        self,
        requests: Sequence[Request] = (),
        tokens: Tensor | None = None,
        logprobs: Logprobs | None = None,
        prompts: Mapping[str, PromptReading] | None = None,
    ) -> None:
        self.tokens = tokens
        self._prompts = prompts or {}
        self._requests = requests
        self._received = None if tokens is None else Received(tokens)
        self._logprobs = logprobs
        self._rows = {request: row for row, request in enumerate(requests)}

    def row_of(self, request: Request) -> int:
        """Which of the tokens is the request's."""
        return self._rows[request]

    def read(self) -> Sampled:
        """The tokens; waits until they are there."""
        if self._received is None:
            return Sampled([])
        tokens = self._received.tolist()
        found = {} if self._logprobs is None else self._logprobs.read()
        prompts = {name: reading.read() for name, reading in self._prompts.items()}
        return Sampled(
            tokens, {self._requests[row].request_id: e for row, e in found.items()}, prompts
        )


class ModelRunner:
    """Makes the inputs of steps and turns hidden states into tokens.

    Args:
        model: for its logits.
        limits: of the scheduler.
        capture_sizes: padded batch sizes that may occur, in tokens.
        kv_caches: of every attention layer; they may be replaced before the first graph is captured.
        windows: of attention layers with a sliding window, in tokens.
        states: of every state-space layer, likewise; empty if the model has none.
        device: where the model is.
    """

    def __init__(
        self,
        model: nn.Module,
        limits: SchedulerLimits,
        *,
        capture_sizes: Sequence[int],
        kv_caches: Mapping[str, tuple[Tensor, Tensor]],
        windows: Mapping[str, int] = MappingProxyType({}),
        device: torch.device,
        states: Mapping[str, tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        self._model = cast(ComputesLogits, model)
        self._limits = limits
        self.kv_caches = kv_caches
        self._windows = windows
        self.states = states or {}
        self._device = device
        largest = max(capture_sizes, default=0)
        tokens = max(limits.max_num_batched_tokens, largest)
        # A decode batch is padded with sequences too, up to the largest captured size.
        sequences = max(limits.max_num_seqs, largest)
        columns = -(-limits.max_model_len // limits.block_size)
        self._input_ids = StepBuffer(tokens, dtype=torch.int64, device=device)
        self._positions = StepBuffer(tokens, dtype=torch.int64, device=device)
        self._slots = StepBuffer(tokens, dtype=torch.int64, device=device)
        self._query_start = StepBuffer(sequences + 1, dtype=torch.int32, device=device)
        self._seq_lens = StepBuffer(sequences, dtype=torch.int32, device=device)
        self._block_table = StepBuffer(
            sequences, columns, dtype=torch.int32, device=device, keeps=True
        )
        self._stale_rows = (sequences, 0)
        """First and one past the last row of the block table that the device does not have yet."""

        self._last = StepBuffer(sequences, dtype=torch.int64, device=device)
        self._fed = StepBuffer(2, sequences, dtype=torch.int64, device=device)
        """Where in the batch a pending token belongs, and which of the tokens of the step before it is."""
        self._buffers: tuple[StepBuffer, ...] = (
            *(self._input_ids, self._positions, self._slots, self._query_start),
            *(self._seq_lens, self._block_table, self._last, self._fed),
        )
        self._state_slots: StepBuffer | None = None
        if self.states:
            self._state_slots = StepBuffer(sequences, dtype=torch.int64, device=device)
            self._buffers += (self._state_slots,)
        self._sampling = Sampling()
        """Of the step before."""
        self._histories: WeakKeyDictionary[Request, TokenHistory] = WeakKeyDictionary()
        """Of requests with penalties; gone with the request."""
        self._prompts = PromptLogprobs(lambda hidden: self._model.compute_logits(hidden))
        self._rows: list[tuple[list[int], int] | None] = [None] * sequences
        """Per row of the block table: the request's list of blocks that is written there, and how many."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether the device works while Python goes on."""
        return self._device.type != "cpu"

    def prepare(
        self, batch: Batch, decision: DispatchDecision
    ) -> tuple[Tensor, Tensor, ForwardContext]:
        """Write a batch into the buffers, padded to the dispatched size.

        Tokens that the step before is still computing are put in place on the device.

        Returns:
            Input ids and positions, int64 [T] each, and the forward's context.
        """
        for buffer in self._buffers:
            buffer.turn()
        at = 0
        pending: list[tuple[int, int]] = []
        for row, item in enumerate(batch.items):
            start, count = item.start, item.count
            self._write_blocks(row, item.request.blocks)
            known = item.request.tokens[start : start + count]
            self._input_ids.host[at : at + len(known)] = known
            if len(known) < count:
                pending.append((at + count - 1, self._sampling.row_of(item.request)))
            self._write_place(row, at, start, count)
            at += count
        # Between pieces attention runs as what the batch is; inside a graph as what was recorded.
        uniform = decision.descriptor.uniform_decode or (
            batch.uniform_decode and decision.mode is CUDAGraphMode.PIECEWISE
        )
        if self._state_slots is not None:
            slots = [item.request.state_slot for item in batch.items]
            self._state_slots.host[: len(slots)] = slots
        lengths = [item.count for item in batch.items]
        inputs = self._views(decision.descriptor.num_tokens, uniform, lengths)
        self._feed(pending)
        return inputs

    def _feed(self, pending: Sequence[tuple[int, int]]) -> None:
        """Copy tokens of the step before to where they are inputs of this one."""
        if not pending:
            return
        assert self._sampling.tokens is not None
        count = len(pending)
        self._fed.host[:, :count] = np.asarray(pending).T
        places, rows = self._fed.view(2)[:, :count]
        self._input_ids.device.index_copy_(0, places, self._sampling.tokens[rows])

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

        Every sequence reads block 0 of the KV cache, and none writes, nor has a request's state: requests may
        be running.
        """
        size, longest = descriptor.num_tokens, self._limits.max_model_len
        if self._device.type == "cpu":
            # An emulated graph records calls, not shapes: long contexts would only cost time.
            longest = min(longest, max(size, self._limits.block_size))
        self._input_ids.host[:size] = 0
        self._block_table.host[:] = 0
        self._rows = [None] * len(self._rows)
        self._stale_rows = (0, len(self._rows))
        at = 0
        lengths: list[int] = []
        while at < size:
            count = 1 if descriptor.uniform_decode else min(size - at, longest)
            start = longest - count if descriptor.uniform_decode else 0
            self._write_place(len(lengths), at, start, count)
            at += count
            lengths.append(count)
        self._slots.host[:size] = -1
        if self._state_slots is not None:
            self._state_slots.host[: len(lengths)] = PADDING_SLOT
        return self._views(size, descriptor.uniform_decode, lengths)

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
        self, padded: int, uniform: bool, lengths: Sequence[int]
    ) -> tuple[Tensor, Tensor, ForwardContext]:
        """The buffers as the inputs of a batch of ``padded`` tokens, with sequences of ``lengths`` in it."""
        tokens, sequences = sum(lengths), len(lengths)
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
        if self._state_slots is not None:
            self._state_slots.host[sequences:rows] = PADDING_SLOT
        metadata = AttentionMetadata(
            query_start=self._query_start.view(rows + 1),
            seq_lens=self._seq_lens.view(rows),
            block_table=self._view_blocks(rows),
            slot_mapping=self._slots.view(padded),
            uniform_decode=uniform,
            max_query_len=max(lengths),
            query_lens=tuple(lengths),
            state_slots=None if self._state_slots is None else self._state_slots.view(rows),
        )
        context = ForwardContext(
            attention=metadata,
            kv_caches=self.kv_caches,
            windows=self._windows,
            states=self.states,
        )
        return self._input_ids.view(padded), self._positions.view(padded), context

    def _view_blocks(self, rows: int) -> Tensor:
        """The first rows of the block table; only rows that changed are sent to the device."""
        first, last = self._stale_rows
        self._stale_rows = (len(self._rows), 0)
        return self._block_table.view(rows, first, last)

    @torch.inference_mode()
    def sample(self, batch: Batch, hidden: Tensor) -> Sampling:
        """Enqueue the choice of the next token of every item that samples, in order.

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
        self._sampling = Sampling()
        prompts = self._prompts.collect(batch, hidden)
        if requests:
            rows = [self._sample_row(request) for request in requests]
            self._last.host[: len(last)] = last
            logits = self._model.compute_logits(hidden[self._last.view(len(last))])
            tokens = sample(logits, rows)
            found = logprobs_of(logits, rows, tokens)
            self._sampling = Sampling(requests, tokens, found, prompts)
        return self._sampling

    def _sample_row(self, request: Request) -> SampleRow:
        history = None
        if request.params.has_penalties:
            history = self._histories.get(request)
            if history is None:
                history = TokenHistory(request.tokens[: request.prompt_length])
                self._histories[request] = history
            history.follow(request.tokens)
        # The token that is sampled is pending itself.
        step = request.generated + request.pending - 1
        return SampleRow(request.params, request.seed, step, history, request.stop_ids)

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
