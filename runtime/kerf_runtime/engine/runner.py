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
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from kerf_runtime.config.compilation import CUDAGraphMode
from kerf_runtime.cudagraph.decode_head import ForwardOutput
from kerf_runtime.cudagraph.descriptor import BatchDescriptor, DispatchDecision
from kerf_runtime.engine.buffers import BlockTable, StepInputs
from kerf_runtime.engine.logprobs import Logprobs, logprobs_of
from kerf_runtime.engine.messages import SamplingParams, TokenLogprobs, TokenOutput
from kerf_runtime.engine.prompt_logprobs import PromptLogprobs, PromptReading
from kerf_runtime.engine.request import Request
from kerf_runtime.engine.sample_row import SampleRow, TokenHistory
from kerf_runtime.engine.sampler import sample
from kerf_runtime.engine.scheduler import Batch, SchedulerLimits
from kerf_runtime.engine.state_cache import PADDING_SLOT
from kerf_runtime.engine.transfer import Mailbox, Received
from kerf_runtime.errors import ModelError
from kerf_runtime.forward_context import AttentionMetadata, ForwardContext

__all__ = ["ComputesLogits", "ModelRunner", "Sampled", "Sampling"]


class ComputesLogits(Protocol):
    """What the runner needs of a model beside its compiled forward."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[R, E] -> [R, vocab] in the model's data type."""


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
        received: the same tokens on their way to the CPU.
        logprobs: of these tokens, if asked for.
        prompts: what is told about prompts that are complete, by request id.
    """

    def __init__(
        self,
        requests: Sequence[Request] = (),
        tokens: Tensor | None = None,
        received: Received | None = None,
        logprobs: Logprobs | None = None,
        prompts: Mapping[str, PromptReading] | None = None,
    ) -> None:
        self.tokens = tokens
        self._prompts = prompts or {}
        self._requests = requests
        self._received = received
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
        # A decode batch is padded with sequences too, up to the largest captured size; and a batch made up for
        # recording has as many sequences as it needs to be full.
        needed = -(-tokens // limits.max_model_len)
        sequences = max(limits.max_num_seqs, largest, needed)
        columns = -(-limits.max_model_len // limits.block_size)
        self._inputs = StepInputs(tokens, sequences, device=device)
        self._table = BlockTable(sequences, columns, device=device)
        self._mailbox = Mailbox(sequences, device)
        self._ramp = np.arange(sequences + 1, dtype=np.int32)
        self._sampling = Sampling()
        """Of the step before."""
        self._histories: WeakKeyDictionary[Request, TokenHistory] = WeakKeyDictionary()
        """Of requests with penalties; gone with the request."""
        self._prompts = PromptLogprobs(lambda hidden: self._model.compute_logits(hidden))

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
        self._inputs.turn()
        host = self._inputs.host
        ids: list[int] = []
        last: list[int] = []
        fed: list[tuple[int, int]] = []
        for row, item in enumerate(batch.items):
            request = item.request
            self._table.write(row, request.blocks)
            known = request.tokens[item.start : item.start + item.count]
            ids += known
            if len(known) < item.count:
                fed.append((len(ids), self._sampling.row_of(request)))
                ids.append(0)
            if item.samples:
                last.append(len(ids) - 1)
        host.input_ids[: len(ids)] = ids
        host.last[: len(last)] = last
        if self.states:
            slots = [item.request.state_slot for item in batch.items]
            host.state_slots[: len(slots)] = slots
        pairs = np.asarray(fed).reshape(-1, 2)
        host.fed_places[: len(fed)], host.fed_rows[: len(fed)] = pairs.T
        lengths = [item.count for item in batch.items]
        self._write_places([item.start for item in batch.items], lengths)
        # Between pieces attention runs as what the batch is; inside a graph as what was recorded.
        uniform = decision.descriptor.uniform_decode or (
            batch.uniform_decode and decision.mode is CUDAGraphMode.PIECEWISE
        )
        inputs = self._views(decision.descriptor.num_tokens, uniform, lengths)
        self._feed(pairs)
        return inputs

    def _feed(self, fed: np.ndarray[Any, Any]) -> None:
        """Copy tokens of the step before to where they are inputs of this one.

        Args:
            fed: int64 [N, 2], place in the batch and row of the token; on the device already.
        """
        if not len(fed):
            return
        tokens, inputs = self._sampling.tokens, self._inputs.device
        assert tokens is not None
        count, (place, row) = len(fed), fed[0]
        # Priorities can change the order: rows need not ascend as places do.
        if (np.diff(fed, axis=0) == 1).all():
            inputs.input_ids[place : place + count].copy_(tokens[row : row + count])
        else:
            inputs.input_ids.index_copy_(
                0, inputs.fed_places[:count], tokens[inputs.fed_rows[:count]]
            )

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
        self._inputs.turn()
        host = self._inputs.host
        host.input_ids[:size] = 0
        self._table.clear()
        if descriptor.uniform_decode:
            starts, lengths = [longest - 1] * size, [1] * size
        else:
            lengths = [longest] * (size // longest)
            lengths += [rest] if (rest := size % longest) else []
            starts = [0] * len(lengths)
        self._write_places(starts, lengths)
        host.slots[:size] = -1
        host.state_slots[: len(lengths)] = PADDING_SLOT
        return self._views(size, descriptor.uniform_decode, lengths)

    def _write_places(self, starts: Sequence[int], lengths: Sequence[int]) -> None:
        """Where the tokens of every sequence stand and are cached.

        Args:
            starts: position of the first token of each sequence.
            lengths: tokens of each sequence.
        """
        size, host = self._limits.block_size, self._inputs.host
        first, count = np.asarray(starts), np.asarray(lengths)
        ends = count.cumsum()
        begins, total = ends - count, int(ends[-1])
        rows = self._ramp[: len(count)]
        if total == len(count):
            positions = first
        else:
            rows = rows.repeat(count)
            positions = np.arange(total) + (first - begins).repeat(count)
        blocks, offsets = np.divmod(positions, size)
        host.positions[:total] = positions
        host.slots[:total] = self._table.host[rows, blocks].astype(np.int64) * size + offsets
        host.query_start[: len(count)] = begins
        host.seq_lens[: len(count)] = first + count

    def _views(
        self, padded: int, uniform: bool, lengths: Sequence[int]
    ) -> tuple[Tensor, Tensor, ForwardContext]:
        """The buffers as the inputs of a batch of ``padded`` tokens, with sequences of ``lengths`` in it."""
        tokens, sequences = sum(lengths), len(lengths)
        host, inputs = self._inputs.host, self._inputs.device
        host.input_ids[tokens:padded] = 0
        host.positions[tokens:padded] = 0
        host.slots[tokens:padded] = -1
        if uniform:
            rows = padded
            host.query_start[: rows + 1] = self._ramp[: rows + 1]
        else:
            rows = max(min(padded, self._limits.max_num_seqs), sequences)
            host.query_start[sequences : rows + 1] = tokens
        host.seq_lens[sequences:rows] = 0
        host.state_slots[sequences:rows] = PADDING_SLOT
        self._inputs.send()
        self._table.send()
        metadata = AttentionMetadata(
            query_start=inputs.query_start[: rows + 1],
            seq_lens=inputs.seq_lens[:rows],
            block_table=self._table.device[:rows],
            slot_mapping=inputs.slots[:padded],
            uniform_decode=uniform,
            max_query_len=max(lengths),
            query_lens=tuple(lengths),
            state_slots=inputs.state_slots[:rows] if self.states else None,
        )
        context = ForwardContext(
            attention=metadata,
            kv_caches=self.kv_caches,
            windows=self._windows,
            states=self.states,
        )
        return inputs.input_ids[:padded], inputs.positions[:padded], context

    @torch.inference_mode()
    def sample(self, batch: Batch, output: ForwardOutput) -> Sampling:
        """Enqueue the choice of the next token of every item that samples, in order.

        Args:
            batch: that was prepared last, and ran.
            output: of its forward.
        """
        requests = [item.request for item in batch.items if item.samples]
        self._sampling = Sampling()
        prompts = self._prompts.collect(batch, output.hidden)
        if requests:
            rows = [self._sample_row(request) for request in requests]
            # Where every token is the last of its sequence it need not be looked for.
            every = len(requests) == batch.num_tokens
            inputs = self._inputs.device
            last = slice(len(requests)) if every else inputs.last[: len(requests)]
            logits, likeliest = self._logits(output, last)
            lagging = any(row.lags and row.is_penalised for row in rows)
            newest = inputs.input_ids[last] if lagging else None
            tokens = sample(logits, rows, likeliest=likeliest, newest=newest)
            found = logprobs_of(logits, rows, tokens)
            received = self._mailbox.receive(tokens)
            self._sampling = Sampling(requests, tokens, received, found, prompts)
        return self._sampling

    def _logits(self, output: ForwardOutput, last: slice | Tensor) -> tuple[Tensor, Tensor | None]:
        """Of the rows that sample: [R, vocab], and int64 [R] of the likeliest tokens if the graph told."""
        if output.decoded is None:
            return self._model.compute_logits(output.hidden[last]), None
        logits, likeliest = output.decoded
        return logits[last], likeliest[last]

    def _sample_row(self, request: Request) -> SampleRow:
        history = None
        if request.has_penalties:
            history = self._histories.get(request)
            if history is None:
                history = TokenHistory(request.tokens[: request.prompt_length])
                self._histories[request] = history
            history.follow(request.tokens)
        # The token that is sampled is pending itself; the one before it may be too.
        step, lags = request.generated + request.pending - 1, request.pending > 1
        return SampleRow(request.params, request.seed, step, history, lags, request.stop_ids)

    @torch.inference_mode()
    def warm_up_sampling(self, hidden: Tensor) -> None:
        """Compute and sample logits once, every way there is.

        Args:
            hidden: [R, E], one row per sequence.

        Raises:
            ModelError: the logits are no numbers: every answer would be made up.
        """
        logits = self._model.compute_logits(hidden)
        if not logits.isfinite().all():
            raise ModelError(
                "the model computes logits that are no numbers",
                where="the first forward",
                hint="The checkpoint is damaged, or its values do not fit engine.dtype",
            )
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
            row = SampleRow(params, 0, 0, TokenHistory([0]), lags=True, stop_ids=frozenset((0,)))
            rows = [row] * len(logits)
            newest = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
            logprobs_of(logits, rows, sample(logits, rows, newest=newest))
