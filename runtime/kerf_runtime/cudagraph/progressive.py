"""Which graphs a progressive start records first, and which one next while it serves.  Pure, no torch.

Ready comes after the largest graph of each kind and every power of two: every batch that would have a
graph has one, at most twice its size.  The others follow between steps, in the order of what they save:
padding rows of the batches that were really seen.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from statistics import median

from kerf_runtime.config.compilation import CUDAGraphMode
from kerf_runtime.cudagraph.descriptor import GraphKey
from kerf_runtime.cudagraph.dispatcher import Batch

__all__ = ["UnitSeconds", "first_graphs", "next_graph"]


def first_graphs(plan: Sequence[GraphKey]) -> list[GraphKey]:
    """What is recorded before the engine is ready, in the order of ``plan``.

    Args:
        plan: everything, largest first within each kind.
    """
    kinds: set[tuple[CUDAGraphMode, bool]] = set()
    first = []
    for mode, descriptor in plan:
        kind, size = (mode, descriptor.uniform_decode), descriptor.num_tokens
        if kind not in kinds or size & (size - 1) == 0:
            first.append((mode, descriptor))
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
    """How long a unit of capturing takes, by mode: the median of what was seen, so that one hiccup is no verdict.

    A unit is a warm-up or a recording of one size; the first of all is left out, since it loads what no
    other one has to.
    """

    def __init__(self) -> None:
        self._seen: dict[CUDAGraphMode, list[float]] = {}

    def add(self, mode: CUDAGraphMode, seconds: float) -> None:
        """Note a unit."""
        self._seen.setdefault(mode, []).append(seconds)

    def expected(self, mode: CUDAGraphMode) -> float:
        """Seconds; 0 if fewer than two units were seen."""
        return median(self._seen.get(mode, ())[1:] or (0.0,))
