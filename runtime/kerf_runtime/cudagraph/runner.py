"""Captures every graph before serving, then runs each step in the mode the dispatcher chose."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kerf_runtime.config.compilation import CUDAGraphMode
from kerf_runtime.config.resolve import EffectiveConfig
from kerf_runtime.cudagraph.budget import DroppedGraph, GraphKey, budget_changes, fit_budget
from kerf_runtime.cudagraph.descriptor import BatchDescriptor, DispatchDecision
from kerf_runtime.cudagraph.dispatcher import Dispatcher, capture_plan
from kerf_runtime.cudagraph.static_inputs import StaticInputs
from kerf_runtime.cudagraph.wrapper import CapturedGraph, CaptureGate, CUDAGraphWrapper
from kerf_runtime.cudagraph.writes import WriteWatch
from kerf_runtime.errors import CaptureError
from kerf_runtime.forward_context import ForwardContext, set_forward_context
from kerf_runtime.platforms.interface import DeviceMemory, Platform
from kerf_runtime.reasons import ReasonedChange

__all__ = ["Capturable", "DummyBatch", "GraphRunner", "named_tensors"]

logger = logging.getLogger(__name__)

DummyBatch = Callable[[BatchDescriptor], tuple[Tensor, Tensor, ForwardContext]]
"""Makes the realistic batch that is captured for a descriptor: input ids, positions, context."""

NamedTensors = Callable[[], Iterable[tuple[str, Tensor]]]
"""Gives the model's parameters and buffers as they are now."""

Progress = Callable[[str, float], None]
"""Called with what is being captured and the fraction done."""


class Capturable(Protocol):
    """What the runner captures: a forward, made of pieces where it was compiled piecewise."""

    @property
    def forward(self) -> Callable[[Tensor, Tensor], Tensor]: ...

    def wrap_pieces(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace every compiled piece by ``wrap(piece)``."""
        ...


class GraphRunner:
    """Owns the wrappers and the dispatcher of one model.

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
        self._weights = weights
        self._debug = debug
        self._weight_addresses: dict[str, int] = {}
        self._effective = effective
        self._num_warmups = num_warmups
        self._gate = CaptureGate()
        self._pieces: list[CUDAGraphWrapper] = []
        self._plan = capture_plan(effective.mode, effective.capture_sizes, max_num_seqs)
        if effective.mode.has_mode(CUDAGraphMode.PIECEWISE):
            model.wrap_pieces(self._wrap_piece)
        self._full = CUDAGraphWrapper(
            model.forward, CUDAGraphMode.FULL, platform.static_graph, self._gate
        )
        self._forward: Callable[..., Tensor] = self._full
        if effective.cudagraph_copy_inputs:
            self._forward = StaticInputs(self._full, max_tokens)
        self._dispatcher = Dispatcher(effective.mode, ())
        self._capture_seconds = 0.0
        self._measured: dict[GraphKey, int] = {}
        """Bytes that the device lost to each descriptor, where the platform can tell."""
        self._dropped: list[DroppedGraph] = []

    def _wrap_piece(self, piece: Callable[..., Any]) -> Callable[..., Any]:
        wrapper = CUDAGraphWrapper(
            piece,
            CUDAGraphMode.PIECEWISE,
            self._platform.static_graph,
            self._gate,
            check_addresses=self._debug,
        )
        self._pieces.append(wrapper)
        return wrapper

    @property
    def plan(self) -> list[GraphKey]:
        """What ``capture_all`` captures, in order; afterwards what it captured and kept."""
        return list(self._plan)

    @property
    def mode(self) -> CUDAGraphMode:
        """The mode in force: NONE if every graph had to be dropped."""
        lost = self._dropped and not self._plan
        return CUDAGraphMode.NONE if lost else self._effective.mode

    @property
    def capture_sizes(self) -> tuple[int, ...]:
        """The sizes that have a graph in any mode, ascending."""
        return tuple(sorted({descriptor.num_tokens for _, descriptor in self._plan}))

    @property
    def changes(self) -> tuple[ReasonedChange, ...]:
        """What ``graphMemoryBudget`` changed; empty if everything fits."""
        budget = self._effective.graph_memory_budget or 0
        return budget_changes(self._effective.mode, self._plan, self._dropped, budget)

    @torch.inference_mode()
    def capture_all(self, dummy_batch: DummyBatch, progress: Progress) -> None:
        """Warm up and capture every descriptor of the plan, largest first.

        While the measured memory is above ``graphMemoryBudget``, graphs are dropped and the others are
        captured anew: what a graph of a shared pool holds is free only when no other graph holds it.

        Raises:
            CaptureError: the forward writes to its weights, waits for a value, or memory ran out.
        """
        started = time.perf_counter()
        if self._plan:
            self._watch_writes(dummy_batch(self._plan[-1][1]))
        self._weight_addresses = {name: t.data_ptr() for name, t in self._weights()}
        self._capture_plan(dummy_batch, progress, self._num_warmups)
        while self._drop_above_budget():
            self._capture_plan(dummy_batch, progress, num_warmups=0)
        self._capture_seconds = time.perf_counter() - started
        self._dispatcher = Dispatcher(self.mode, self._plan)

    def _drop_above_budget(self) -> bool:
        """Whether graphs had to go; then no graph is left, and the plan has those that may stay."""
        budget = self._effective.graph_memory_budget
        if budget is None:
            return False
        measured = {key: self._describe(*key)["bytes"] for key in self._plan}
        decision = fit_budget(measured, budget)
        for graph in decision.dropped:
            mode, descriptor = graph.key
            logger.warning(
                "dropped the %s graph of %d %s tokens, %d bytes (%s: all graphs hold %d bytes, "
                "graphMemoryBudget is %d)",
                mode,
                descriptor.num_tokens,
                "decode" if descriptor.uniform_decode else "mixed",
                graph.bytes,
                graph.reason,
                sum(measured.values()),
                budget,
            )
        if not decision.dropped:
            return False
        self._dropped += decision.dropped
        self._plan = list(decision.kept)
        for wrapper in (self._full, *self._pieces):
            wrapper.captured.clear()
        self._measured.clear()
        return True

    def _capture_plan(self, dummy_batch: DummyBatch, progress: Progress, num_warmups: int) -> None:
        warmed: set[tuple[str, int]] = set()
        with _frozen_garbage_collector(), self._platform.capture_pass():
            for index, (mode, descriptor) in enumerate(self._plan):
                kind = "decode" if descriptor.uniform_decode else "mixed"
                progress(f"{mode} {kind} {descriptor.num_tokens}", index / len(self._plan))
                input_ids, positions, context = dummy_batch(descriptor)
                warm = replace(context, mode=CUDAGraphMode.NONE, descriptor=descriptor)
                for _ in range(num_warmups if _is_new(descriptor, warmed) else 0):
                    with set_forward_context(warm):
                        self._forward(input_ids, positions)
                before = self._platform.memory()
                self._gate.open = True
                try:
                    with set_forward_context(replace(context, mode=mode, descriptor=descriptor)):
                        self._platform.synchronize(self._forward(input_ids, positions))
                finally:
                    self._gate.open = False
                self._measure(mode, descriptor, before)

    def _watch_writes(self, batch: tuple[Tensor, Tensor, ForwardContext]) -> None:
        """Run one forward that is refused if it writes to a parameter or a buffer."""
        weights = list(self._weights())
        if not weights:
            return
        input_ids, positions, context = batch
        with set_forward_context(context), WriteWatch(weights):
            self._platform.synchronize(self._forward(input_ids, positions))

    def check_weights(self) -> None:
        """Make sure that no weight has moved since the capture; call it after weights were loaded again.

        Raises:
            CaptureError: a recorded graph would read memory that is no longer the weight's.
        """
        now = {name: t.data_ptr() for name, t in self._weights()}
        before = self._weight_addresses
        moved = sorted(name for name in before if now.get(name) != before[name])
        if moved:
            more = f" and {len(moved) - 3} more" if len(moved) > 3 else ""
            raise CaptureError(
                f"weights moved since the graphs were captured: {', '.join(moved[:3])}{more}",
                hint="Copy new values into the tensors that exist, or capture again",
            )

    def _measure(
        self, mode: CUDAGraphMode, descriptor: BatchDescriptor, before: DeviceMemory | None
    ) -> None:
        """Note what capturing ``descriptor`` took from the device: its buffers and the driver's nodes."""
        after = self._platform.memory()
        if before is None or after is None:
            return
        held = sum(entry.graph.memory_bytes for entry in self._entries(mode, descriptor))
        # What ran between the pieces may have allocated too; that memory is not the graphs'.
        elsewhere = after.reserved - before.reserved - held
        self._measured[mode, descriptor] = max(0, before.free - after.free - elsewhere)

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
            output: Tensor = self._forward(input_ids, positions)
        return output

    def dispatch_totals(self) -> dict[str, int]:
        """Steps per mode."""
        return self._dispatcher.totals()

    def dispatch_detail(self) -> list[dict[str, object]]:
        """Steps per mode, padded size and reason."""
        return self._dispatcher.detail()

    def report(self) -> dict[str, Any]:
        """The ``graphs`` part of ``/debug/graphs``."""
        descriptors = [self._describe(mode, descriptor) for mode, descriptor in self._plan]
        descriptors = [d for d in descriptors if d["nodes"]]
        return {
            "backend": self._effective.platform.graph_backend,
            "captured": len(descriptors),
            "memory_bytes": sum(d["bytes"] for d in descriptors),
            "memory_budget_bytes": self._effective.graph_memory_budget,
            "dropped": [graph.to_json() for graph in self._dropped],
            "capture_seconds": self._capture_seconds,
            "descriptors": descriptors,
        }

    def _describe(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> dict[str, Any]:
        entries = self._entries(mode, descriptor)
        counted = sum(e.graph.memory_bytes for e in entries)
        return {
            "mode": mode.value,
            "num_tokens": descriptor.num_tokens,
            "uniform_decode": descriptor.uniform_decode,
            "nodes": sum(e.graph.nodes for e in entries),
            "bytes": self._measured.get((mode, descriptor), counted),
            "seconds": sum(e.seconds for e in entries),
            "hits": max((e.hits for e in entries), default=0),
        }

    def _entries(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> list[CapturedGraph]:
        """The graphs of one descriptor: one in mode FULL, one per piece in mode PIECEWISE."""
        wrappers = [self._full] if mode is CUDAGraphMode.FULL else self._pieces
        return [w.captured[descriptor] for w in wrappers if descriptor in w.captured]


def _is_new(descriptor: BatchDescriptor, warmed: set[tuple[str, int]]) -> bool:
    """Whether no batch of that size, or none of that kind, has been warmed up; notes that both are now.

    What a first run initialises (kernels, workspaces) depends on the size for everything but attention, and
    for attention on the kind: a decode batch has nothing new where a mixed one of its size has run.
    """
    facts = {("size", descriptor.num_tokens), ("decode", int(descriptor.uniform_decode))}
    new = not facts <= warmed
    warmed |= facts
    return new


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer with its name."""
    yield from model.named_parameters()
    yield from model.named_buffers()


@contextmanager
def _frozen_garbage_collector() -> Iterator[None]:
    """Keep the collector from walking everything that exists while many objects are made."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
