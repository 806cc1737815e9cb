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
from kerf_runtime.cudagraph.budget import DroppedGraph, budget_changes, fit_budget
from kerf_runtime.cudagraph.descriptor import DispatchDecision, GraphKey, graph_name
from kerf_runtime.cudagraph.dispatcher import Dispatcher, capture_plan
from kerf_runtime.cudagraph.estimate import MemoryEstimate, Trial, estimate_memory, next_trials
from kerf_runtime.cudagraph.progressive import UnitSeconds, first_graphs, next_graph
from kerf_runtime.cudagraph.recorder import Capturable, DummyBatch, GraphRecorder, Recorded
from kerf_runtime.forward_context import ForwardContext, set_forward_context
from kerf_runtime.platforms.interface import DeviceMemory, Platform
from kerf_runtime.reasons import ConfigReason, ReasonedChange

__all__ = ["Capturable", "DummyBatch", "GraphRunner", "named_tensors"]

logger = logging.getLogger(__name__)

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
        debug: compare the addresses of every piece's inputs on every replay, not of the forward's only.
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
        debug: bool = False,
    ) -> None:
        self._platform = platform
        self._weights = WeightAddresses(weights)
        self._effective = effective
        self._num_warmups = num_warmups
        self._plan = capture_plan(effective.mode, effective.capture_sizes, max_num_seqs)
        self._recorder = GraphRecorder(
            model,
            platform,
            pieces=effective.mode.has_mode(CUDAGraphMode.PIECEWISE),
            max_tokens=max_tokens if effective.cudagraph_copy_inputs else None,
            debug=debug,
        )
        self._dispatcher = Dispatcher(effective.mode, ())
        self._writes_watched = False
        self._capture_seconds = 0.0
        self._estimate: MemoryEstimate | None = None
        self._left_by_trials = 0
        self._free_before: int | None = None
        self._peak = 0
        self._bytes: dict[GraphKey, int] = {}
        """Of every captured graph."""
        self._shared_bytes = 0
        """Of all graphs together, which no single one would give back."""
        self._dropped: list[DroppedGraph] = []
        self._capture_mode = effective.capture_mode
        self._pending: list[GraphKey] = []
        self._unit_seconds = UnitSeconds()
        self._longest_delay = 0.0
        self._changes: list[ReasonedChange] = []

    @property
    def plan(self) -> list[GraphKey]:
        """What is captured, in order, whether it has been yet or not; nothing that had to be dropped."""
        return list(self._plan)

    @property
    def pending(self) -> int:
        """Graphs that are captured between steps and have not been yet."""
        return len(self._pending)

    @property
    def mode(self) -> CUDAGraphMode:
        """The mode in force: NONE if every graph had to be dropped."""
        lost = self._dropped and not self._plan
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
        """What ``graphMemoryBudget`` and ``captureDelayMilliseconds`` changed; empty if nothing."""
        budget = self._effective.graph_memory_budget or 0
        dropped = budget_changes(self._effective.mode, self._plan, self._dropped, budget)
        return (*dropped, *self._changes)

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
        pooled = self._platform.memory() is not None
        trials: list[Trial] = []
        with self._recorder.many():
            before = self._begin_pass()
            while keys := next_trials(self._plan, trials, pooled=pooled):
                trials += self._try(keys, dummy_batch, progress)
        self._recorder.forget([trial.key for trial in trials])
        self._platform.release_memory()
        after = self._platform.memory()
        if before is not None and after is not None:
            self._left_by_trials = max(0, before.free - after.free)
        estimate = estimate_memory(self._plan, trials, pooled=pooled)
        if estimate.disturbed:
            logger.warning(
                "another process took memory of the device while that of graphs was estimated: "
                "%d bytes may be wrong",
                estimate.total(),
            )
        self._drop_above_budget(estimate)
        self._estimate = estimate.without([graph.key for graph in self._dropped])
        return max(0, self._estimate.total() - self._left_by_trials)

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
            first = first_graphs(self._plan)
        self._capture_many(first, dummy_batch, progress)
        self._pending = [key for key in self._plan if key not in self._bytes]
        self._capture_many(self._too_slow_between_steps(), dummy_batch, progress)
        self._share_out()
        self._finish_if_complete()
        self._capture_seconds = time.perf_counter() - started
        self._dispatcher = Dispatcher(self.mode, self._bytes)

    @torch.inference_mode()
    def capture_next(self, dummy_batch: DummyBatch) -> None:
        """Do one unit of a progressive capture between two steps: warm up or record one pending graph.

        Raises:
            CaptureError: as ``capture_all``.
        """
        key = next_graph(self._pending, self._bytes.keys(), self._dispatcher.batches)
        mode, descriptor = key
        started = time.perf_counter()
        inputs = dummy_batch(descriptor)
        if self._num_warmups and self._recorder.needs_warmup(descriptor):
            self._platform.synchronize(self._recorder.warm_up(descriptor, inputs, times=1))
        else:
            with self._platform.capture_pass(tidy=False):
                recorded = self._recorder.record(key, inputs)
            self._bytes[key] = recorded.bytes
            self._note_peak(recorded)
            self._pending.remove(key)
            self._finish_if_complete()
            self._dispatcher.use(self._bytes, self.mode)
        seconds = time.perf_counter() - started
        self._unit_seconds.add(mode, seconds)
        self._capture_seconds += seconds
        if seconds > max(self._delay_limit, self._longest_delay):
            logger.warning(
                "capturing the %s graph took %.3f s between two steps, captureDelayMilliseconds allows %.3f s",
                graph_name(key),
                seconds,
                self._delay_limit,
            )
        self._longest_delay = max(self._longest_delay, seconds)

    @property
    def _delay_limit(self) -> float:
        """Most seconds of one unit between two steps."""
        return self._effective.capture_delay_milliseconds / 1e3

    def _capture_many(
        self, keys: Sequence[GraphKey], dummy_batch: DummyBatch, progress: Progress
    ) -> None:
        if not keys:
            return
        with self._recorder.many():
            self._begin_pass()
            for key in keys:
                progress(graph_name(key), len(self._bytes) / len(self._plan))
                self._bytes[key] = self._capture(key, dummy_batch).bytes

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
        mode, descriptor = key
        inputs = dummy_batch(descriptor)
        if self._num_warmups and self._recorder.needs_warmup(descriptor):
            self._recorder.warm_up(descriptor, inputs, self._num_warmups)
        started = time.perf_counter()
        recorded = self._recorder.record(key, inputs, trial=trial)
        self._note_peak(recorded)
        self._unit_seconds.add(mode, time.perf_counter() - started)
        return recorded

    def _begin_pass(self) -> DeviceMemory | None:
        """Memory now; the peak is counted from what was free before the trials."""
        memory = self._platform.memory()
        self._free_before = None if memory is None else memory.free + self._left_by_trials
        return memory

    def _note_peak(self, recorded: Recorded) -> None:
        """What recording and warming up have in use at the worst moment."""
        if self._free_before is not None and recorded.free is not None:
            self._peak = max(self._peak, self._free_before - recorded.free)

    def _too_slow_between_steps(self) -> list[GraphKey]:
        """The pending graphs whose capture would delay a step by more than it may; none is pending after."""
        seconds = {mode: self._unit_seconds.expected(mode) for mode, _ in self._pending}
        modes = sorted(mode for mode in seconds if seconds[mode] > self._delay_limit)
        if not modes:
            return []
        slow = [key for key in self._pending if key[0] in modes]
        self._pending = [key for key in self._pending if key[0] not in modes]
        if not self._pending:
            self._capture_mode = CaptureMode.EAGER
        named = ", ".join(f"{mode} {seconds[mode] * 1e3:.0f} ms" for mode in modes)
        self._changes.append(
            ReasonedChange(
                "captureMode",
                CaptureMode.PROGRESSIVE.value,
                f"eager for {', '.join(modes)}" if self._pending else CaptureMode.EAGER.value,
                ConfigReason.CAPTURE_DELAY_LIMIT,
                f"captureDelayMilliseconds is {self._effective.capture_delay_milliseconds}, and capturing a graph "
                f"takes in mode {named}",
            )
        )
        return slow

    def _share_out(self) -> None:
        """Split what the device lost to trials and captures between the graphs, as the estimate tells."""
        if self._estimate is None or self._platform.memory() is None:
            return
        missing = [key for key in self._plan if key not in self._bytes]
        total = self._left_by_trials + sum(self._bytes.values())
        shared_out = self._estimate.without(missing).scaled_to(total)
        self._shared_bytes, self._bytes = shared_out.shared, dict(shared_out.graphs)

    def _finish_if_complete(self) -> None:
        """Once everything is captured, the measured memory must fit too."""
        if not self._pending:
            self._drop_above_budget(MemoryEstimate(self._shared_bytes, self._bytes))

    def _drop_above_budget(self, memory: MemoryEstimate) -> None:
        """Take graphs out of the plan, and destroy them, until ``memory`` fits ``graphMemoryBudget``."""
        budget = self._effective.graph_memory_budget
        if budget is None:
            return
        decision = fit_budget(memory.graphs, max(0, budget - memory.shared))
        if not decision.dropped:
            return
        gone = [graph.key for graph in decision.dropped]
        logger.warning(
            "dropped %d graphs (%s): all %d need %d bytes, graphMemoryBudget is %d",
            len(gone),
            decision.dropped[0].reason,
            len(memory.graphs),
            memory.total(),
            budget,
        )
        for key in gone:
            self._plan.remove(key)
            self._bytes.pop(key, None)
        self._recorder.forget(gone)
        self._dropped += decision.dropped

    def _refuse_writes(self, dummy_batch: DummyBatch) -> None:
        """Once, before anything is recorded: a forward that writes to its weights is an error."""
        if self._plan and not self._writes_watched:
            self._recorder.watch_writes(self._weights.tensors(), dummy_batch(self._plan[-1][1]))
            self._writes_watched = True

    def check_weights(self) -> None:
        """Make sure that no weight has moved since the capture; call it after weights were loaded again.

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
    ) -> Tensor:
        """One forward.

        Args:
            decision: from ``dispatch``.
            input_ids: int64 [decision.descriptor.num_tokens], a view of the persistent buffer.
            positions: int64, same shape.
            context: attention metadata and KV cache; mode and descriptor are set here.

        Returns:
            Hidden states [num_tokens, hidden size]; overwritten by the next replay of the same graph.
        """
        context = replace(context, mode=decision.mode, descriptor=decision.descriptor)
        with set_forward_context(context):
            output: Tensor = self._recorder.forward(input_ids, positions)
        return output

    def dispatch_totals(self) -> dict[str, int]:
        """Steps per mode."""
        return self._dispatcher.totals()

    def dispatch_detail(self) -> list[dict[str, object]]:
        """Steps per mode, padded size and reason."""
        return self._dispatcher.detail()

    def report(self) -> dict[str, Any]:
        """The ``graphs`` part of ``/debug/graphs``."""
        descriptors = [
            self._recorder.describe(key, self._bytes[key])
            for key in self._plan
            if key in self._bytes
        ]
        memory = self._shared_bytes + sum(self._bytes.values())
        return {
            "backend": self._effective.platform.graph_backend,
            "captured": len(descriptors),
            "memory_bytes": memory,
            "shared_bytes": self._shared_bytes,
            "peak_bytes": max(memory, self._peak),
            **self._estimate_report(memory),
            "memory_budget_bytes": self._effective.graph_memory_budget,
            "dropped": [graph.to_json() for graph in self._dropped],
            "planned": len(self._plan),
            "pending": [graph_name(key) for key in self._pending],
            "longest_delay_seconds": self._longest_delay,
            "capture_seconds": self._capture_seconds,
            "descriptors": descriptors,
        }

    def _estimate_report(self, memory: int) -> dict[str, Any]:
        """What the captured graphs were estimated to take, and how far that was off."""
        if self._estimate is None:
            return {"estimated_bytes": None, "estimate_error": None}
        missing = [key for key in self._estimate.graphs if key not in self._bytes]
        estimated = self._estimate.without(missing).total()
        error = (estimated - memory) / memory if memory else 0.0
        return {"estimated_bytes": estimated, "estimate_error": error}
