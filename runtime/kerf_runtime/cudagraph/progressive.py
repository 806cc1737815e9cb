"""Which graphs a progressive start records first, and which one next while it serves.  Pure, no torch.

Ready comes after the largest graph of each kind and every power of two: every batch that would have a
graph has one, at most twice its size.  The others follow between steps, in the order of what they save:
padding rows of the batches that were really seen.

A unit of work that is expected to take longer than a step may be delayed runs only while there is no request.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import inf

from kerf_runtime.config.compilation import CaptureMode, CUDAGraphMode
from kerf_runtime.cudagraph.descriptor import (
    BatchDescriptor,
    GraphKey,
    GraphKind,
    graph_kind,
    graph_name,
    graph_names,
)
from kerf_runtime.cudagraph.dispatcher import Batch
from kerf_runtime.reasons import ConfigReason, ReasonedChange

__all__ = ["Pending", "UnitSeconds", "delay_change", "first_graphs", "next_graph"]

logger = logging.getLogger(__name__)


def first_graphs(plan: Sequence[GraphKey], *, logits_rows: int = 0) -> list[GraphKey]:
    """What is recorded before the engine is ready, in the order of ``plan``: also whatever needs most memory.

    Args:
        plan: everything, largest first within each kind.
        logits_rows: of the largest decode graph that computes logits.
    """
    kinds: set[GraphKind] = set()
    first = []
    for key in plan:
        kind, size = graph_kind(key, logits_rows), key[1].num_tokens
        if kind not in kinds or size & (size - 1) == 0:
            first.append(key)
        kinds.add(kind)
    return first


def next_graph(
    pending: Sequence[GraphKey], captured: Collection[GraphKey], batches: Mapping[Batch, int]
) -> GraphKey:
    """The pending graph that would have saved the most padding so far; the largest if none would have.

    Args:
        pending: not empty; what may be recorded.
        captured: what can be dispatched already; a larger graph of every pending one's kind is among it.
        batches: real tokens and kind of the batches seen, with their counts.
    """
    decode_apart = any(descriptor.uniform_decode for _, descriptor in captured)

    def saved(key: GraphKey) -> int:
        mode, descriptor = key
        size, uniform = descriptor.num_tokens, descriptor.uniform_decode
        sizes = sorted(
            d.num_tokens for m, d in captured if m is mode and d.uniform_decode is uniform
        )
        at = bisect_left(sizes, size)
        below = sizes[at - 1] if at else 0
        hits = sum(
            count
            for (tokens, decode), count in batches.items()
            # Decode batches run in graphs of mixed ones where they have none of their own.
            if below < tokens <= size and uniform is (decode and decode_apart)
        )
        return hits * (sizes[at] - size)

    return max(pending, key=lambda key: (saved(key), key[1].num_tokens, key))


class UnitSeconds:
    """How long units of capturing took, which tells what the next one will take.

    A unit is a recording, or a warm-up, which runs in mode NONE.  It takes no less for a larger batch, so one is
    expected to take what the last one of at least its size took.  Graphs are captured largest first, so that is
    one of nearly its size; and where serving makes a unit slower than it was, the ones after it know.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[CUDAGraphMode, bool], dict[int, float]] = {}
        """By kind and size, in the order in which they were done."""

    def add(self, unit: GraphKey, seconds: float) -> None:
        """Note a unit."""
        mode, descriptor = unit
        sizes = self._seen.setdefault((mode, descriptor.uniform_decode), {})
        sizes.pop(descriptor.num_tokens, None)
        sizes[descriptor.num_tokens] = seconds

    def expected(self, unit: GraphKey) -> float:
        """Seconds; infinite if none of at least that size was seen."""
        mode, descriptor = unit
        sizes = self._seen.get((mode, descriptor.uniform_decode), {})
        last = (took for size, took in reversed(sizes.items()) if size >= descriptor.num_tokens)
        return next(last, inf)


class Pending:
    """The graphs that are left to record, and which units of them may run between two steps.

    Args:
        limit: most seconds of a unit between two steps.
        needs_warmup: whether a batch has to run once before its graph is recorded.
    """

    def __init__(self, limit: float, needs_warmup: Callable[[BatchDescriptor], bool]) -> None:
        self.limit = limit
        self.seconds = UnitSeconds()
        self.longest_delay = 0.0
        """Most seconds that a unit between two steps took."""
        self._needs_warmup = needs_warmup
        self._keys: list[GraphKey] = []
        self._fitting: list[GraphKey] = []

    @property
    def keys(self) -> Sequence[GraphKey]:
        """What is left."""
        return self._keys

    @property
    def due(self) -> bool:
        """Whether a unit may run between two steps."""
        return bool(self._fitting)

    def leave(self, keys: Iterable[GraphKey]) -> None:
        """These are left to record; call it after every unit."""
        self._keys = list(keys)
        self._fitting = [key for key in self._keys if self._fits(self.unit(key))]

    def slow(self) -> list[GraphKey]:
        """Those that could not be captured between two steps from now on."""
        return [key for key in self._keys if not all(map(self._fits, self._units(key)))]

    def unit(self, key: GraphKey) -> GraphKey:
        """The next unit of a graph."""
        return self._units(key)[0]

    def choose(
        self, captured: Collection[GraphKey], batches: Mapping[Batch, int], *, idle: bool
    ) -> GraphKey | None:
        """The graph whose unit is next; None if everything that is left takes too long between two steps.

        Args:
            captured: as for ``next_graph``.
            batches: as for ``next_graph``.
            idle: whether there is no step to be delayed.
        """
        allowed = self._keys if idle else self._fitting
        return next_graph(allowed, captured, batches) if allowed else None

    def note_delay(self, key: GraphKey, seconds: float) -> None:
        """Note how long a unit of ``key`` took between two steps."""
        if seconds > max(self.limit, self.longest_delay):
            logger.warning(
                "capturing the %s graph took %.3f s between two steps, captureDelayMilliseconds allows %.3f s",
                graph_name(key),
                seconds,
                self.limit,
            )
        self.longest_delay = max(self.longest_delay, seconds)

    def _units(self, key: GraphKey) -> list[GraphKey]:
        _, descriptor = key
        warmup = (CUDAGraphMode.NONE, descriptor)
        return [warmup, key] if self._needs_warmup(descriptor) else [key]

    def _fits(self, unit: GraphKey) -> bool:
        return self.seconds.expected(unit) <= self.limit


def delay_change(milliseconds: int, slow: Sequence[GraphKey], pending: int) -> ReasonedChange:
    """What it changes that ``slow`` graphs are captured before serving, and ``pending`` are left for later."""
    return ReasonedChange(
        "captureMode",
        CaptureMode.PROGRESSIVE.value,
        f"eager for {len(slow)} graphs" if pending else CaptureMode.EAGER.value,
        ConfigReason.CAPTURE_DELAY_LIMIT,
        f"captureDelayMilliseconds is {milliseconds}; to warm up or to record takes longer for "
        f"{graph_names(slow)}",
    )
