"""Warms up, records and forgets graphs of one model.  Which ones, and when, is decided by ``runner``."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from kerf_runtime.config.compilation import CUDAGraphMode
from kerf_runtime.cudagraph.decode_head import DecodeHead, ForwardOutput
from kerf_runtime.cudagraph.descriptor import BatchDescriptor, GraphKey, computes_logits
from kerf_runtime.cudagraph.out_of_memory import memory_explained
from kerf_runtime.cudagraph.static_inputs import StaticInputs
from kerf_runtime.cudagraph.wrapper import CapturedGraph, CaptureGate, CUDAGraphWrapper
from kerf_runtime.cudagraph.writes import WriteWatch
from kerf_runtime.forward_context import ForwardContext, get_forward_context, set_forward_context
from kerf_runtime.platforms.interface import DeviceMemory, Platform

__all__ = ["Capturable", "DummyBatch", "GraphRecorder", "Recorded"]

Inputs = tuple[Tensor, Tensor, ForwardContext]
"""Input ids, positions, context."""

DummyBatch = Callable[[BatchDescriptor], Inputs]
"""Makes the realistic batch that is recorded for a descriptor."""


class Capturable(Protocol):
    """What is recorded: a forward, made of pieces where it was compiled piecewise."""

    @property
    def forward(self) -> Callable[[Tensor, Tensor], Tensor]: ...

    def wrap_pieces(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace every compiled piece by ``wrap(piece)``."""
        ...


@dataclass(frozen=True)
class Recorded:
    """What recording one graph took.

    Attributes:
        bytes: of the device, or of the graph's own buffers where the platform cannot tell.
        pool: bytes of it that PyTorch's allocator took for recordings; 0 where the platform cannot tell.
        free: bytes of the device that were free afterwards; None where the platform cannot tell.
    """

    bytes: int
    pool: int
    free: int | None


class GraphRecorder:
    """The wrappers around a model's forward and its pieces.

    Args:
        model: the prepared model.
        platform: makes the graphs.
        pieces: whether each compiled piece is recorded too.
        max_tokens: of the buffers that inputs are copied to; None to record the caller's own tensors.
        head: what full graphs of decode batches compute from the hidden states; None for nothing.
        debug: compare the addresses of everything that is read on every replay, not of the forward's inputs only.
    """

    def __init__(
        self,
        model: Capturable,
        platform: Platform,
        *,
        pieces: bool,
        max_tokens: int | None,
        head: DecodeHead | None,
        debug: bool,
    ) -> None:
        self._platform = platform
        self._head = head
        self._debug = debug
        self._gate = CaptureGate()
        self._pieces: list[CUDAGraphWrapper] = []
        if pieces:
            model.wrap_pieces(self._wrap_piece)
        self._model_forward = model.forward
        self._full = CUDAGraphWrapper(
            self._forward_and_decode,
            CUDAGraphMode.FULL,
            platform.static_graph,
            self._gate,
            check_context=debug,
        )
        self.forward: Callable[..., ForwardOutput] = self._full
        if max_tokens is not None:
            self.forward = StaticInputs(self._full, max_tokens)
        self._warmed: set[tuple[str, int]] = set()

    def _forward_and_decode(self, input_ids: Tensor, positions: Tensor) -> ForwardOutput:
        """The forward; while the full graph of a decode batch is recorded, its logits and tokens too."""
        hidden = self._model_forward(input_ids, positions)
        context = get_forward_context()
        if self._head is None or context.descriptor is None:
            return ForwardOutput(hidden)
        wanted = computes_logits((context.mode, context.descriptor), self._head.rows)
        return ForwardOutput(hidden, self._head(hidden) if wanted else None)

    @property
    def logits_rows(self) -> int:
        """Of the largest full graph of a decode batch that computes logits; 0 if none does."""
        return 0 if self._head is None else self._head.rows

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

    @contextmanager
    def many(self) -> Iterator[None]:
        """Surrounds the recording of many graphs: the collector does not walk what exists already."""
        gc.collect()
        gc.freeze()
        try:
            with self._platform.capture_pass():
                yield
        finally:
            gc.unfreeze()

    def watch_writes(self, weights: Iterable[tuple[str, Tensor]], inputs: Inputs) -> None:
        """Run one forward that is refused if it writes to a parameter or a buffer.

        Raises:
            CaptureError: it does.
        """
        found = list(weights)
        if not found:
            return
        input_ids, positions, context = inputs
        with (
            self._explained("looking for writes to weights"),
            set_forward_context(context),
            WriteWatch(found),
        ):
            self._platform.synchronize(self.forward(input_ids, positions).hidden)

    def needs_warmup(self, descriptor: BatchDescriptor) -> bool:
        """Whether no batch of that size, or none of that kind, has been warmed up.

        What a first run initialises (kernels, workspaces) depends on the size for everything but
        attention, and for attention on the kind: a decode batch has nothing new where a mixed one of its
        size has run.
        """
        return not _facts(descriptor) <= self._warmed

    def warm_up(self, descriptor: BatchDescriptor, inputs: Inputs, times: int) -> Tensor:
        """Run the batch without graphs; does not wait for the device.

        Raises:
            CaptureMemoryError: memory ran out.
        """
        input_ids, positions, context = inputs
        warm = replace(context, mode=CUDAGraphMode.NONE, descriptor=descriptor)
        doing = f"warming up the graph of {descriptor.num_tokens} tokens"
        with self._explained(doing), set_forward_context(warm):
            for _ in range(times):
                hidden = self.forward(input_ids, positions).hidden
                if self._head is not None:
                    self._head.warm_up(hidden)
        self._warmed |= _facts(descriptor)
        return hidden

    def record(self, key: GraphKey, inputs: Inputs, *, trial: bool = False) -> Recorded:
        """Record the graphs of ``key``: one in mode FULL, one per piece in mode PIECEWISE.

        Args:
            key: mode and descriptor.
            inputs: of the descriptor's size.
            trial: count it as a trial, not as a capture.

        Raises:
            CaptureError: the forward cannot be recorded, or memory ran out.
        """
        mode, descriptor = key
        input_ids, positions, context = inputs
        before = self._platform.memory()
        self._gate.open, self._gate.trial = True, trial
        try:
            with (
                self._explained(f"capturing the graph of {descriptor.num_tokens} tokens"),
                set_forward_context(replace(context, mode=mode, descriptor=descriptor)),
            ):
                self._platform.synchronize(self.forward(input_ids, positions).hidden)
        finally:
            self._gate.open = self._gate.trial = False
        held = sum(entry.graph.memory_bytes for entry in self.entries(key))
        return _taken(before, self._platform.memory(), held)

    def _explained(self, doing: str) -> AbstractContextManager[None]:
        """What runs between graphs and without them allocates too."""
        return memory_explained(doing, self._platform.memory)

    def entries(self, key: GraphKey) -> list[CapturedGraph]:
        """The graphs of one key."""
        mode, descriptor = key
        found = (wrapper.captured.get(descriptor) for wrapper in self._wrappers(mode))
        return [entry for entry in found if entry is not None]

    def _wrappers(self, mode: CUDAGraphMode) -> list[CUDAGraphWrapper]:
        """Those that record and replay in ``mode``."""
        return [self._full] if mode is CUDAGraphMode.FULL else self._pieces

    def describe(self, key: GraphKey, size: int) -> dict[str, Any]:
        """One entry of ``/debug/graphs``.

        Args:
            key: of the graph.
            size: its bytes.
        """
        mode, descriptor = key
        entries = self.entries(key)
        return {
            "mode": mode.value,
            "num_tokens": descriptor.num_tokens,
            "uniform_decode": descriptor.uniform_decode,
            "nodes": sum(e.graph.nodes for e in entries),
            "logits": computes_logits(key, self.logits_rows),
            "bytes": size,
            "seconds": sum(e.seconds for e in entries),
            "hits": max((e.hits for e in entries), default=0),
        }

    def forget(self, keys: Iterable[GraphKey]) -> None:
        """Destroy graphs."""
        for mode, descriptor in keys:
            for wrapper in self._wrappers(mode):
                wrapper.captured.pop(descriptor, None)


def _facts(descriptor: BatchDescriptor) -> set[tuple[str, int]]:
    return {("size", descriptor.num_tokens), (descriptor.kind, 0)}


def _taken(before: DeviceMemory | None, after: DeviceMemory | None, held: int) -> Recorded:
    """What a recording took from the device: its buffers and what the driver keeps."""
    if before is None or after is None:
        return Recorded(held, 0, None)
    # What ran between the pieces may have allocated too; that memory is not the graphs'.
    elsewhere = after.reserved - before.reserved - held
    return Recorded(max(0, before.free - after.free - elsewhere), held, after.free)
