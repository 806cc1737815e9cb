"""The static-graph wrapper: captures on the first run of a descriptor, replays afterwards.

A wrapper trusts the forward context: when the context's mode equals its own it captures or replays
the context's descriptor; otherwise it passes the call through.  FULL and PIECEWISE wrappers therefore
nest in one call chain.  It holds no input buffers and copies nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kerf_runtime.compilation.counters import compilation_counter
from kerf_runtime.config.compilation import CUDAGraphMode
from kerf_runtime.cudagraph.addresses import context_addresses, moved
from kerf_runtime.cudagraph.descriptor import BatchDescriptor
from kerf_runtime.errors import CaptureError
from kerf_runtime.forward_context import ForwardContext, get_forward_context
from kerf_runtime.platforms.interface import StaticGraph

__all__ = ["CUDAGraphWrapper", "CaptureGate", "CapturedGraph"]


@dataclass
class CaptureGate:
    """Whether capturing is allowed now, and whether what is captured is only a trial."""

    open: bool = False
    trial: bool = False


@dataclass
class CapturedGraph:
    """A captured graph, its cost and its use."""

    graph: StaticGraph
    input_addresses: tuple[int | None, ...]
    seconds: float
    context_addresses: dict[str, int] = field(default_factory=dict)
    hits: int = 0


class CUDAGraphWrapper:
    """Wraps ``runnable`` for one mode.

    Args:
        runnable: what is captured; called with tensors and sizes.
        mode: FULL or PIECEWISE.
        make_graph: makes an empty static graph of the platform.
        gate: tells whether a capture is allowed.
        check_addresses: compare the addresses of all tensor inputs on every replay.
        check_context: compare those of metadata and caches too, which a whole forward reads.
    """

    def __init__(
        self,
        runnable: Callable[..., Any],
        mode: CUDAGraphMode,
        make_graph: Callable[[], StaticGraph],
        gate: CaptureGate,
        *,
        check_addresses: bool = True,
        check_context: bool = False,
    ) -> None:
        self._runnable = runnable
        self._mode = mode
        self._make_graph = make_graph
        self._gate = gate
        self._check_addresses = check_addresses
        self._check_context = check_context
        self.captured: dict[BatchDescriptor, CapturedGraph] = {}

    def __call__(self, *inputs: Any) -> Any:
        context = get_forward_context()
        if context.mode is not self._mode or context.descriptor is None:
            return self._runnable(*inputs)
        entry = self.captured.get(context.descriptor)
        if entry is None:
            return self._capture(context.descriptor, inputs)
        if self._check_addresses:
            self._compare_addresses(context.descriptor, entry, inputs)
        if self._check_context:
            self._compare_context(context, entry)
        entry.hits += 1
        compilation_counter.graph_replays += 1
        return entry.graph.replay()

    def _capture(self, descriptor: BatchDescriptor, inputs: tuple[Any, ...]) -> Any:
        if not self._gate.open:
            compilation_counter.captures_after_startup += 1
            raise CaptureError(
                f"capture of {descriptor} was attempted after start-up",
                where=f"mode {self._mode}",
                hint="This is a bug in the dispatcher: it answered with a graph that does not exist",
            )
        started = time.perf_counter()
        graph = self._make_graph()
        output = graph.capture(self._runnable, inputs)
        seconds = time.perf_counter() - started
        # Not the output itself: whether a graph keeps it alive is the graph's own decision.
        read = context_addresses(get_forward_context()) if self._check_context else {}
        self.captured[descriptor] = CapturedGraph(graph, _addresses(inputs), seconds, read)
        if self._gate.trial:
            compilation_counter.trial_captures += 1
        else:
            compilation_counter.graphs_captured += 1
        return output

    def _compare_addresses(
        self, descriptor: BatchDescriptor, entry: CapturedGraph, inputs: tuple[Any, ...]
    ) -> None:
        actual = _addresses(inputs)
        if len(actual) != len(entry.input_addresses):
            raise CaptureError(
                f"{descriptor} was captured with {len(entry.input_addresses)} inputs and is called "
                f"with {len(actual)}",
                where=f"mode {self._mode}",
            )
        if actual != entry.input_addresses:
            pairs = zip(entry.input_addresses, actual, strict=True)
            moved = [index for index, (before, now) in enumerate(pairs) if before != now]
            raise CaptureError(
                f"inputs {moved} moved since {descriptor} was captured: a replay would read stale memory",
                where=f"mode {self._mode}",
                hint="Pass the same persistent buffers on every step; capture again after weights moved",
            )

    def _compare_context(self, context: ForwardContext, entry: CapturedGraph) -> None:
        if found := moved(entry.context_addresses, context_addresses(context)):
            raise CaptureError(
                f"{found} moved since {context.descriptor} was captured: a replay would read stale memory",
                where=f"mode {self._mode}",
                hint="Keep metadata and caches in the same persistent buffers, or capture again",
            )


def _addresses(inputs: tuple[Any, ...]) -> tuple[int | None, ...]:
    """Address of every tensor input, None in the place of other inputs."""
    return tuple(t.data_ptr() if isinstance(t, Tensor) else None for t in inputs)
