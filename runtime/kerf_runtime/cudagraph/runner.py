"""Captures graphs before serving, or between steps, and runs each step in the mode the dispatcher chose."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kerf_runtime.config.compilation import CaptureMode, CUDAGraphMode
from kerf_runtime.config.resolve import EffectiveConfig
from kerf_runtime.cudagraph.addresses import NamedTensors, WeightAddresses, named_tensors
from kerf_runtime.cudagraph.budget import expected_hits, fit_budget
from kerf_runtime.cudagraph.decode_head import DecodeHead, ForwardOutput
from kerf_runtime.cudagraph.descriptor import (
    BatchDescriptor,
    DispatchDecision,
    GraphKey,
    graph_name,
)
from kerf_runtime.cudagraph.dispatcher import Dispatcher, capture_plan
from kerf_runtime.cudagraph.drops import DroppedGraph, Drops
from kerf_runtime.cudagraph.estimate import MemoryEstimate, Trial, estimate_memory, next_trials
from kerf_runtime.cudagraph.graph_memory import GraphMemory
from kerf_runtime.cudagraph.progressive import Pending, delay_change, first_graphs
from kerf_runtime.cudagraph.recorder import Capturable, DummyBatch, GraphRecorder, Recorded
from kerf_runtime.errors import CaptureError, CaptureMemoryError
from kerf_runtime.forward_context import ForwardContext, set_forward_context
from kerf_runtime.platforms.interface import Platform
from kerf_runtime.reasons import ConfigReason, ReasonedChange

__all__ = ["Capturable", "DummyBatch", "GraphRunner", "named_tensors"]

logger = logging.getLogger(__name__)

_WEIGHTS_EVERY = 64
"""Steps of which one compares the addresses of weights in debug mode: there are hundreds of them."""

Progress = Callable[[str, float], None]
"""Called with what is being captured and the fraction done."""


class GraphRunner:
    """Owns the graphs and the dispatcher of one model.

    Args:
        model: the prepared model.
        effective: the configuration in force.
        platform: makes the graphs.
        max_num_seqs: largest uniform decode batch.
        max_tokens: largest batch, padding included; for ``cudagraphCopyInputs``.
        num_warmups: uncaptured runs of each batch before its capture.
        weights: parameters and buffers, which the forward must not write to and which must not move.
        head: what full graphs of decode batches compute from the hidden states; None for nothing.
        debug: compare the addresses of all that is read on every replay (of weights on some), not of inputs only.
    """

    def __init__(
        self,
        model: Capturable,
        effective: EffectiveConfig,
        platform: Platform,
        *,
        max_num_seqs: int,
        max_tokens: int = 65536,
        num_warmups: int = 1,
        weights: NamedTensors = tuple,
        head: DecodeHead | None = None,
        debug: bool = False,
    ) -> None:
        self._platform = platform
        self._weights = WeightAddresses(weights, every=_WEIGHTS_EVERY if debug else 0)
        self._effective = effective
        self._num_warmups = num_warmups
        self._plan = capture_plan(effective.mode, effective.capture_sizes, max_num_seqs)
        self._recorder = GraphRecorder(
            model,
            platform,
            pieces=effective.mode.has_mode(CUDAGraphMode.PIECEWISE),
            max_tokens=max_tokens if effective.cudagraph_copy_inputs else None,
            head=head,
            debug=debug,
        )
        self._dispatcher = Dispatcher(effective.mode, ())
        self._writes_watched = False
        self._capture_seconds = 0.0
        self._memory = GraphMemory(platform)
        self._drops = Drops(effective.mode)
        self._capture_mode = effective.capture_mode
        self._pending = Pending(effective.capture_delay_milliseconds / 1e3, self._needs_warmup)
        self._changes: list[ReasonedChange] = []

    @property
    def plan(self) -> list[GraphKey]:
        """What is captured, in order, whether it has been yet or not; nothing that had to be dropped."""
        return list(self._plan)

    @property
    def pending(self) -> int:
        """Graphs that are captured between steps and have not been yet."""
        return len(self._pending.keys)

    @property
    def capture_due(self) -> bool:
        """Whether a part of that may be done between two steps; what takes too long waits until there is none."""
        return self._pending.due

    @property
    def mode(self) -> CUDAGraphMode:
        """The mode in force: NONE if every graph had to be dropped."""
        lost = self._drops.graphs and not self._plan
        return CUDAGraphMode.NONE if lost else self._effective.mode

    @property
    def capture_mode(self) -> CaptureMode:
        """Eager if nothing could be left for later because it would take too long between two steps."""
        return self._capture_mode

    @property
    def capture_sizes(self) -> tuple[int, ...]:
        """The sizes that have a graph in any mode, ascending."""
        return tuple(sorted({descriptor.num_tokens for _, descriptor in self._plan}))

    @property
    def changes(self) -> tuple[ReasonedChange, ...]:
        """What budget, bounds and failures of capturing changed; empty if nothing."""
        return (*self._drops.changes(self._plan), *self._changes)

    @torch.inference_mode()
    def estimate_memory(self, dummy_batch: DummyBatch, progress: Progress) -> int:
        """Record a few graphs, forget them, and tell how many more bytes of the device all will take.

        Graphs that cannot fit ``graphMemoryBudget`` are dropped from the plan at once.

        Raises:
            CaptureError: as ``capture_all``.
        """
        if not self._plan:
            return 0
        self._refuse_writes(dummy_batch)
        pooled, rows = self._memory.pooled, self._recorder.logits_rows
        trials: list[Trial] = []
        with self._recorder.many():
            before = self._memory.begin_pass()
            while keys := next_trials(self._plan, trials, pooled=pooled, logits_rows=rows):
                trials += self._try(keys, dummy_batch, progress)
        self._recorder.forget([trial.key for trial in trials])
        self._memory.end_trials(before)
        estimate = estimate_memory(self._plan, trials, pooled=pooled, logits_rows=rows)
        if estimate.disturbed:
            logger.warning(
                "another process took memory of the device while that of graphs was estimated: "
                "%d bytes may be wrong",
                estimate.total(),
            )
        self._drop_above_budget(estimate)
        self._memory.estimate = estimate.without([graph.key for graph in self._drops.graphs])
        return self._memory.still_needed()

    @torch.inference_mode()
    def capture_all(self, dummy_batch: DummyBatch, progress: Progress) -> None:
        """Warm up and capture every descriptor of the plan, largest first.

        With ``captureMode: progressive`` only what must be there at once; ``capture_next`` does the rest.

        Raises:
            CaptureError: the forward writes to its weights, waits for a value, or memory ran out.
        """
        started = time.perf_counter()
        self._refuse_writes(dummy_batch)
        self._weights.remember()
        first = self._plan
        if self._effective.capture_mode is CaptureMode.PROGRESSIVE:
            first = first_graphs(self._plan, logits_rows=self._recorder.logits_rows)
        self._capture_many(first, dummy_batch, progress)
        self._leave_pending()
        self._capture_many(self._too_slow_between_steps(), dummy_batch, progress)
        self._leave_pending()
        self._memory.share_out(self._plan)
        self._finish_if_complete()
        self._capture_seconds = time.perf_counter() - started
        self._dispatcher = Dispatcher(self.mode, self._memory.bytes)

    @torch.inference_mode()
    def capture_next(self, dummy_batch: DummyBatch, *, idle: bool) -> bool:
        """Do one unit of a progressive capture: warm up or record one pending graph.

        A graph that cannot be recorded is dropped, and every pending one where memory ran out: larger graphs
        that run their batches are there.

        Args:
            dummy_batch: as for ``capture_all``.
            idle: whether there is no request; if there are, only units run that are short enough.

        Returns:
            Whether there was something to do.
        """
        key = self._pending.choose(self._memory.bytes.keys(), self._dispatcher.batches, idle=idle)
        if key is None:
            return False
        unit, known = self._pending.unit(key), set(self._memory.bytes)
        started = time.perf_counter()
        try:
            self._do(unit, key, dummy_batch)
        except CaptureError as error:
            self._drop_failed(key, error)
        self._pending.seconds.add(unit, time.perf_counter() - started)
        self._leave_pending()
        self._finish_if_complete()
        if self._memory.bytes.keys() != known:
            self._dispatcher.use(self._memory.bytes, self.mode)
        seconds = time.perf_counter() - started
        self._capture_seconds += seconds
        if not idle:
            self._pending.note_delay(key, seconds)
        return True

    def _do(self, unit: GraphKey, key: GraphKey, dummy_batch: DummyBatch) -> None:
        inputs = dummy_batch(key[1])
        if unit != key:
            self._platform.synchronize(self._recorder.warm_up(key[1], inputs, times=1))
            return
        with self._platform.capture_pass(tidy=False):
            recorded = self._recorder.record(key, inputs)
        self._memory.bytes[key] = recorded.bytes
        self._memory.note_peak(recorded)

    def _needs_warmup(self, descriptor: BatchDescriptor) -> bool:
        return self._num_warmups > 0 and self._recorder.needs_warmup(descriptor)

    def _leave_pending(self) -> None:
        self._pending.leave(key for key in self._plan if key not in self._memory.bytes)

    def _capture_many(
        self, keys: Sequence[GraphKey], dummy_batch: DummyBatch, progress: Progress
    ) -> None:
        if not keys:
            return
        with self._recorder.many():
            self._memory.begin_pass()
            for key in keys:
                progress(graph_name(key), len(self._memory.bytes) / len(self._plan))
                self._memory.bytes[key] = self._capture(key, dummy_batch).bytes

    def _try(
        self, keys: Sequence[GraphKey], dummy_batch: DummyBatch, progress: Progress
    ) -> Iterator[Trial]:
        for index, key in enumerate(keys):
            progress(f"trial of {graph_name(key)}", index / len(keys))
            took = self._capture(key, dummy_batch, trial=True)
            # Numbers only: whoever holds a graph keeps the pool of all of them.
            nodes = [entry.graph.nodes for entry in self._recorder.entries(key)]
            yield Trial(key, took.bytes, took.pool, len(nodes), sum(nodes))

    def _capture(self, key: GraphKey, dummy_batch: DummyBatch, *, trial: bool = False) -> Recorded:
        """Warm up and record."""
        started = time.perf_counter()
        inputs = dummy_batch(key[1])
        if self._needs_warmup(key[1]):
            output = self._recorder.warm_up(key[1], inputs, self._num_warmups)
            if self._capture_mode is CaptureMode.PROGRESSIVE:
                self._platform.synchronize(output)
                seconds = (time.perf_counter() - started) / self._num_warmups
                self._pending.seconds.add((CUDAGraphMode.NONE, key[1]), seconds)
                started = time.perf_counter()
        recorded = self._recorder.record(key, inputs, trial=trial)
        self._memory.note_peak(recorded)
        self._pending.seconds.add(key, time.perf_counter() - started)
        return recorded

    def _too_slow_between_steps(self) -> list[GraphKey]:
        """The pending graphs whose capture would delay a step by more than it may: they are captured at once."""
        slow = self._pending.slow()
        if not slow:
            return []
        left = self.pending - len(slow)
        if not left:
            self._capture_mode = CaptureMode.EAGER
        limit = self._effective.capture_delay_milliseconds
        self._changes.append(delay_change(limit, slow, left))
        return slow

    def _finish_if_complete(self) -> None:
        """Once everything is captured, the measured memory must fit too."""
        if not self.pending:
            self._drop_above_budget(self._memory.measured)

    def _drop_above_budget(self, memory: MemoryEstimate) -> None:
        """Take graphs out of the plan, and destroy them, until ``memory`` fits ``graphMemoryBudget``."""
        budget = self._effective.graph_memory_budget
        if budget is None:
            return
        decision = fit_budget(
            memory.graphs,
            max(0, budget - memory.shared),
            expected_hits=expected_hits(memory.graphs),
        )
        if not decision.dropped:
            return
        logger.warning(
            "dropped %d graphs (%s): all %d need %d bytes, graphMemoryBudget is %d",
            len(decision.dropped),
            decision.dropped[0].reason,
            len(memory.graphs),
            memory.total(),
            budget,
        )
        self._drop(decision.dropped, f"graphMemoryBudget is {budget} bytes")

    def _drop_failed(self, key: GraphKey, error: CaptureError) -> None:
        """Go on without a graph that cannot be recorded, or without all that are left if memory ran out."""
        gone, reason = [key], ConfigReason.CAPTURE_FAILED
        if isinstance(error, CaptureMemoryError):
            gone, reason = list(self._pending.keys), ConfigReason.CAPTURE_OUT_OF_MEMORY
        logger.warning(
            "dropped %d graphs (%s), the first is %s: %s", len(gone), reason, graph_name(key), error
        )
        estimate = self._memory.estimate
        expected = {} if estimate is None else estimate.graphs
        self._drop([DroppedGraph(key, expected.get(key, 0), reason) for key in gone], str(error))

    def _drop(self, dropped: Sequence[DroppedGraph], why: str) -> None:
        """Take graphs out of the plan and destroy them."""
        gone = [graph.key for graph in dropped]
        for key in gone:
            self._plan.remove(key)
        self._memory.drop(gone, self._recorder.forget)
        self._drops.add(dropped, why)

    def _refuse_writes(self, dummy_batch: DummyBatch) -> None:
        """Once, before anything is recorded: a forward that writes to its weights is an error."""
        if self._plan and not self._writes_watched:
            self._recorder.watch_writes(self._weights.tensors(), dummy_batch(self._plan[-1][1]))
            self._writes_watched = True

    def check_weights(self) -> None:
        """Make sure that no weight has moved since the capture: before serving, and after weights were loaded again.

        Raises:
            CaptureError: a recorded graph would read memory that is no longer the weight's.
        """
        self._weights.check()

    def dispatch(self, num_tokens: int, uniform_decode: bool) -> DispatchDecision:
        """How to run the next batch; counts the decision."""
        return self._dispatcher.dispatch(num_tokens, uniform_decode)

    @torch.inference_mode()
    def run(
        self,
        decision: DispatchDecision,
        input_ids: Tensor,
        positions: Tensor,
        context: ForwardContext,
    ) -> ForwardOutput:
        """One forward.

        Args:
            decision: from ``dispatch``.
            input_ids: int64 [decision.descriptor.num_tokens], a view of the persistent buffer.
            positions: int64, same shape.
            context: attention metadata and KV cache; mode and descriptor are set here.
        """
        self._weights.step()
        context = replace(context, mode=decision.mode, descriptor=decision.descriptor)
        with set_forward_context(context):
            return self._recorder.forward(input_ids, positions)

    def dispatch_totals(self) -> dict[str, int]:
        """Steps per mode."""
        return self._dispatcher.totals()

    def dispatch_detail(self) -> list[dict[str, object]]:
        """Steps per mode, padded size and reason."""
        return self._dispatcher.detail()

    def report(self) -> dict[str, Any]:
        """The ``graphs`` part of ``/debug/graphs``."""
        descriptors = [
            self._recorder.describe(key, self._memory.bytes[key])
            for key in self._plan
            if key in self._memory.bytes
        ]
        return {
            "backend": self._effective.platform.graph_backend,
            "captured": len(descriptors),
            **self._memory.report(),
            "memory_budget_bytes": self._effective.graph_memory_budget,
            "dropped": [graph.to_json() for graph in self._drops.graphs],
            "planned": len(self._plan),
            "pending": [graph_name(key) for key in self._pending.keys],
            "longest_delay_seconds": self._pending.longest_delay,
            "capture_seconds": self._capture_seconds,
            "descriptors": descriptors,
        }
