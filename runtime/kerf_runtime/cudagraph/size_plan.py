"""Which capture sizes waste least on real traffic.  Pure, no torch.

A batch of ``n`` tokens runs as the smallest captured size ``s >= n`` and wastes ``s - n`` rows.  Given
how often every ``n`` occurs and how many graphs may be recorded, ``plan_sizes`` finds the list with the
least expected waste.  It is exact: a captured size between two observed ones can be lowered to the
observed one below without a batch noticing, so only observed sizes are candidates (and ``max_num_seqs``,
above which no decode graphs are needed).  The best choice among them is a shortest path, found by
dynamic programming over the number of graphs.  The cost of a step of that path satisfies the quadrangle
inequality, so that the best predecessor moves in one direction only and a layer takes O(m log m)
instead of O(m^2) (F. Yao, "Speed-up in dynamic programming", 1982).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from kerf_runtime.config.compilation import CUDAGraphMode
from kerf_runtime.cudagraph.dispatcher import capture_plan
from kerf_runtime.cudagraph.sizes import PaddedSizes
from kerf_runtime.errors import ConfigError

__all__ = ["Histogram", "SizeUse", "Waste", "count_graphs", "plan_sizes", "waste_of"]

Histogram = Mapping[int, float]
"""Tokens of a batch, without padding -> how often, in any unit."""


@dataclass(frozen=True)
class SizeUse:
    """What one captured size does: steps it runs, rows of them that are padding."""

    size: int
    steps: float
    padding: float


@dataclass(frozen=True)
class Waste:
    """What a list of sizes makes of a histogram.

    Attributes:
        uses: one entry per size, ascending.
        uncaptured: steps above the largest size; they run without a graph and without padding.
        tokens: real tokens of the steps that run in a graph.
    """

    uses: tuple[SizeUse, ...]
    uncaptured: float
    tokens: float

    @property
    def steps(self) -> float:
        """All steps."""
        return self.uncaptured + sum(use.steps for use in self.uses)

    @property
    def padding(self) -> float:
        """Rows of padding in all steps."""
        return sum(use.padding for use in self.uses)

    @property
    def ratio(self) -> float:
        """Padding as a part of all rows that run in a graph, 0 to 1."""
        rows = self.tokens + self.padding
        return self.padding / rows if rows else 0.0


def waste_of(sizes: Sequence[int], histogram: Histogram) -> Waste:
    """The padding that ``sizes`` cause on ``histogram``."""
    table = PaddedSizes(tuple(sizes))
    steps = dict.fromkeys(table.sizes, 0.0)
    padding = dict.fromkeys(table.sizes, 0.0)
    uncaptured = tokens = 0.0
    for real, count in histogram.items():
        size = table.padded(real)
        if size is None:
            uncaptured += count
            continue
        steps[size] += count
        padding[size] += count * (size - real)
        tokens += count * real
    uses = tuple(SizeUse(size, steps[size], padding[size]) for size in table.sizes)
    return Waste(uses, uncaptured, tokens)


def count_graphs(mode: CUDAGraphMode, sizes: Sequence[int], max_num_seqs: int) -> int:
    """Graphs that ``mode`` records for ``sizes``: some sizes need one for decode and one for the rest.

    Raises:
        ConfigError: ``mode`` records none.
    """
    _check_recording(mode)
    return len(capture_plan(mode, tuple(sizes), max_num_seqs))


def plan_sizes(
    histogram: Histogram,
    *,
    max_graphs: int,
    limited_by: str = "--max-graphs",
    max_num_seqs: int,
    max_size: int,
    mode: CUDAGraphMode = CUDAGraphMode.PIECEWISE,
) -> tuple[int, ...]:
    """The capture sizes with the least expected padding; of several the list with the fewest graphs.

    Every batch of at most ``max_size`` tokens that was observed fits a graph, and so does a decode
    batch of ``max_num_seqs`` sequences, observed or not.

    Args:
        histogram: real traffic.
        max_graphs: most graphs to record, as ``count_graphs`` counts them.
        limited_by: what the limit comes from, for the error.
        max_num_seqs: most sequences of a step.
        max_size: largest size to capture, in tokens; larger batches run without a graph.
        mode: decides how many graphs a size needs.

    Raises:
        ConfigError: no list can have those limits; the message has the numbers.
    """
    _check_recording(mode)
    if max_size < max_num_seqs:
        raise ConfigError(
            f"the largest size {max_size} is below maxNumSeqs {max_num_seqs}: a full decode batch "
            "would run without a graph",
            where="--max-size",
            hint=f"Allow at least {max_num_seqs}",
        )
    if mode is CUDAGraphMode.FULL_DECODE_ONLY:
        max_size = max_num_seqs  # no decode batch is larger, and nothing else is recorded
    observed = {size for size, count in histogram.items() if count > 0 and size <= max_size}
    # Decode graphs end at the first size that holds all sequences, so that one is worth considering.
    candidates = sorted(observed | {max_num_seqs})
    top = candidates[-1]
    search = _Search(candidates, histogram, max_num_seqs, mode)
    found = search.best(max_graphs)
    if found is None:
        needed = count_graphs(mode, (top,), max_num_seqs)
        raise ConfigError(
            f"{max_graphs} graphs are too few: mode {mode} needs {needed} for the largest size {top}",
            where=limited_by,
        )
    return found


def _check_recording(mode: CUDAGraphMode) -> None:
    if mode is CUDAGraphMode.NONE:
        raise ConfigError(
            "mode NONE records no graphs, so there are no sizes to plan",
            where="compilation.cudagraphMode",
            hint="Set the mode that the sizes are for",
        )


class _Search:
    """Shortest paths from nothing to the largest candidate; a node is a size, a step its steps' padding.

    Node 0 stands for "no size yet".  ``_waste[graphs][node]`` is the least padding of all batches up to
    the node's size with at most that many graphs, of which the node's are the last.
    """

    def __init__(
        self, candidates: list[int], histogram: Histogram, max_num_seqs: int, mode: CUDAGraphMode
    ) -> None:
        self._sizes = [0, *candidates]
        self._counts = [0.0]
        self._tokens = [0.0]
        for size in candidates:
            count = histogram.get(size, 0)
            self._counts.append(self._counts[-1] + count)
            self._tokens.append(self._tokens[-1] + count * size)
        nodes = len(self._sizes)
        # A graph for decode: every size up to the first one that holds all sequences.
        first = next(n for n in range(1, nodes) if self._sizes[n] >= max_num_seqs)
        mixed = int(mode.mixed_mode() is not CUDAGraphMode.NONE)
        decode = int(mode.decode_mode() is CUDAGraphMode.FULL)
        self._blocks = [
            (0, first, 1, first, mixed + decode),
            (0, first, first, nodes, mixed + decode),
            (first, nodes, first + 1, nodes, mixed),
        ]
        """(first and end of predecessors, first and end of nodes, graphs that such a step adds)."""
        self._waste = [[0.0] + [inf] * (nodes - 1)]
        self._before: list[list[tuple[int, int]]] = [[(0, 0)] * nodes]
        """The best predecessor: its layer and its node."""

    def best(self, max_graphs: int) -> tuple[int, ...] | None:
        """The sizes of the least padding with the fewest graphs; None if ``max_graphs`` is too few."""
        nodes = len(self._sizes)
        for layer in range(1, min(max_graphs, 2 * (nodes - 1)) + 1):
            self._waste.append(list(self._waste[-1]))
            self._before.append([(layer - 1, -1)] * nodes)  # -1: as with one graph less
            for low, high, first, end, graphs in self._blocks:
                if 0 < graphs <= layer and self._waste[layer - graphs][low] < inf:
                    self._relax(layer, layer - graphs, first, end - 1, low, high - 1)
            if self._waste[layer][-1] == 0:
                break
        if self._waste[-1][-1] == inf:
            return None
        layer = next(n for n, waste in enumerate(self._waste) if waste[-1] == self._waste[-1][-1])
        return self._path(layer)

    def _relax(self, layer: int, source: int, first: int, last: int, low: int, high: int) -> None:
        """Improve nodes ``first..last`` by steps from ``low..high``; the middle one splits both ranges."""
        if first > last:
            return
        node = (first + last) // 2
        before = self._waste[source]
        waste, best = inf, low
        for previous in range(low, min(high, node - 1) + 1):
            found = before[previous] + self._step(previous, node)
            if found < waste:
                waste, best = found, previous
        if waste < self._waste[layer][node]:
            self._waste[layer][node] = waste
            self._before[layer][node] = (source, best)
        self._relax(layer, source, first, node - 1, low, best)
        self._relax(layer, source, node + 1, last, best, high)

    def _step(self, previous: int, node: int) -> float:
        """Padding of the batches above the size of ``previous`` that run as the size of ``node``."""
        count = self._counts[node] - self._counts[previous]
        return self._sizes[node] * count - (self._tokens[node] - self._tokens[previous])

    def _path(self, layer: int) -> tuple[int, ...]:
        sizes: list[int] = []
        node = len(self._sizes) - 1
        while node > 0:
            source, previous = self._before[layer][node]
            if previous >= 0:
                sizes.append(self._sizes[node])
                node = previous
            layer = source
        return tuple(reversed(sizes))
