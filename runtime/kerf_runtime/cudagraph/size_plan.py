"""Which capture sizes waste least on real traffic.  Pure, no torch.

A batch of ``n`` tokens runs as the smallest captured size ``s >= n`` and wastes ``s - n`` rows.  Given
how often every ``n`` occurs and how many graphs may be recorded, ``plan_sizes`` finds the list with the
least expected waste.  It is exact: a captured size between two observed ones can be lowered to the
observed one below without a batch noticing, so only observed sizes are candidates (and ``max_num_seqs``,
above which no decode graphs are needed).  The best choice among them is a shortest path, found by
dynamic programming over the number of sizes: forwards over those that have decode graphs, backwards over
those above, which cost less, so that whatever a limit counts, graphs or bytes, every split of it is looked
at.  The cost of a step of that path satisfies the quadrangle inequality, so that the best neighbour moves in
one direction only and a layer takes O(m log m) instead of O(m^2) (F. Yao, "Speed-up in dynamic
programming", 1982).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from kerf_runtime.config.compilation import CUDAGraphMode
from kerf_runtime.cudagraph.dispatcher import capture_plan
from kerf_runtime.cudagraph.sizes import PaddedSizes
from kerf_runtime.errors import ConfigError

__all__ = ["Histogram", "Limit", "SizeUse", "Waste", "count_graphs", "plan_sizes", "waste_of"]

Histogram = Mapping[int, float]
"""Tokens of a batch, without padding -> how often, in any unit."""


@dataclass(frozen=True)
class Limit:
    """What all graphs may take together.

    Attributes:
        most: graphs, or bytes.
        mixed: of it for every graph that is not for decode batches only.
        decode: of it for every graph for decode batches.
        unit: what is counted, for the error.
        where: what the limit comes from, for the error.
    """

    most: int
    mixed: int = 1
    decode: int = 1
    unit: str = "graphs"
    where: str = "--max-graphs"

    def graphs(self, mode: CUDAGraphMode) -> int:
        """Graphs of ``mode`` that there can be at most."""
        mixed, decode = _kinds(mode)
        return self.most // min([self.mixed] * mixed + [self.decode] * decode)


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
    limits: Sequence[Limit],
    max_num_seqs: int,
    max_size: int,
    mode: CUDAGraphMode = CUDAGraphMode.PIECEWISE,
) -> tuple[int, ...]:
    """The capture sizes with the least expected padding; of several the list with the fewest graphs.

    Every batch of at most ``max_size`` tokens that was observed fits a graph, and so does a decode
    batch of ``max_num_seqs`` sequences, observed or not.

    Args:
        histogram: real traffic.
        limits: that all hold; at least one.
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
    mixed, decode = _kinds(mode)
    for limit in limits:
        needed = mixed * limit.mixed + decode * limit.decode
        if limit.most < needed:
            raise ConfigError(
                f"{limit.most} {limit.unit} are too few: mode {mode} needs {needed} for the largest size {candidates[-1]}",
                where=limit.where,
            )
    return _Search(candidates, histogram, max_num_seqs, mode).best(limits)


def _kinds(mode: CUDAGraphMode) -> tuple[int, int]:
    """Graphs of a size that any batch runs in, and that decode batches run in: 0 or 1 each."""
    mixed, decode = mode.mixed_mode(), mode.decode_mode()
    return int(mixed is not CUDAGraphMode.NONE), int(decode is CUDAGraphMode.FULL)


def _check_recording(mode: CUDAGraphMode) -> None:
    if mode is CUDAGraphMode.NONE:
        raise ConfigError(
            "mode NONE records no graphs, so there are no sizes to plan",
            where="compilation.cudagraphMode",
            hint="Set the mode that the sizes are for",
        )


_Choice = tuple[int, float, int]
"""A node, the least padding there is for it, and its neighbour on the path with that padding."""


class _Layers:
    """The least padding by node with at most 0, 1, 2, ... more sizes.

    Args:
        waste: with none.
    """

    def __init__(self, waste: list[float]) -> None:
        self.waste = [waste]
        self._neighbours: list[dict[int, int]] = [{}]

    def add(self, choices: Iterable[_Choice]) -> bool:
        """Allow one more size; False if that improves nothing, and nothing was added."""
        waste, neighbours = list(self.waste[-1]), {}
        for node, found, neighbour in choices:
            if found < waste[node]:
                waste[node], neighbours[node] = found, neighbour
        if neighbours:
            self.waste.append(waste)
            self._neighbours.append(neighbours)
        return bool(neighbours)

    def least(self, node: int, most: int) -> float:
        """The least padding of ``node`` with at most ``most`` more sizes."""
        return self.waste[min(most, len(self.waste) - 1)][node]

    def fewest(self, node: int, most: int) -> int:
        """With how few more sizes that is reached."""
        least = self.least(node, most)
        return next(more for more, waste in enumerate(self.waste) if waste[node] == least)

    def path(self, node: int, most: int) -> list[int]:
        """What follows ``node`` on the path of that padding."""
        path = []
        for neighbours in reversed(self._neighbours[: most + 1]):
            if node in neighbours:
                node = neighbours[node]
                path.append(node)
        return path


class _Search:
    """Shortest paths from nothing to the largest candidate; a node is a size, a step its steps' padding.

    Node 0 stands for "no size yet".  Decode graphs end at the first size that holds all sequences: the *turn*.
    What comes before it costs a graph for decode batches too, what comes after it does not.
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
        self._end = len(self._sizes) - 1
        self._first = next(n for n, size in enumerate(self._sizes) if size >= max_num_seqs)
        """The lowest node that can be the turn."""
        self._mixed, self._decode = _kinds(mode)

    def best(self, limits: Sequence[Limit]) -> tuple[int, ...]:
        """The sizes of the least padding with the fewest graphs; ``limits`` leave room for one size at least."""
        first, end = self._first, self._end
        before = _Layers([0.0] + [inf] * end)
        after = _Layers([inf] * end + [0.0])
        while self._most_after(limits, len(before.waste) + 1) >= 0:
            if not before.add(self._down(before.waste[-1], 1, first - 1)):
                break
        while len(after.waste) <= self._most_after(limits, 1):
            if not after.add(self._up(after.waste[-1], first, end - 1)):
                break
        both = self._mixed + self._decode
        found: list[tuple[float, int, list[int]]] = []
        for count, waste in enumerate(before.waste):
            most = self._most_after(limits, count + 1)
            turns = [
                (w + after.least(turn, most), turn, p)
                for turn, w, p in self._down(waste, first, end)
            ]
            total = min(turns)[0]
            sizes, turn, previous = min(
                (after.fewest(turn, most), turn, p) for w, turn, p in turns if w == total
            )
            path = [
                *reversed(before.path(previous, count)),
                previous,
                turn,
                *after.path(turn, sizes),
            ]
            found.append((total, both * (count + 1) + self._mixed * sizes, path))
        _, _, path = min(found)
        return tuple(self._sizes[node] for node in path if node)

    def _most_after(self, limits: Sequence[Limit], decode_sizes: int) -> int:
        """How many sizes without decode graphs there can be beside ``decode_sizes`` with; negative if even those
        are too many."""
        most = self._end
        for limit in limits:
            left = limit.most - decode_sizes * (
                self._mixed * limit.mixed + self._decode * limit.decode
            )
            most = min(most, left // limit.mixed if self._mixed else left)
        return most

    def _down(self, waste: Sequence[float], first: int, last: int) -> Iterator[_Choice]:
        """The best predecessors of the nodes ``first..last``, of those before the turn."""

        def cost(node: int, previous: int) -> float:
            return waste[previous] + self._step(previous, node) if previous < node else inf

        return _monotone(cost, first, last, 0, self._first - 1)

    def _up(self, waste: Sequence[float], first: int, last: int) -> Iterator[_Choice]:
        """The best successors of the nodes ``first..last``."""

        def cost(node: int, following: int) -> float:
            return waste[following] + self._step(node, following) if following > node else inf

        return _monotone(cost, first, last, first + 1, self._end)

    def _step(self, previous: int, node: int) -> float:
        """Padding of the batches above the size of ``previous`` that run as the size of ``node``."""
        count = self._counts[node] - self._counts[previous]
        return self._sizes[node] * count - (self._tokens[node] - self._tokens[previous])


def _monotone(
    cost: Callable[[int, int], float], first: int, last: int, low: int, high: int
) -> Iterator[_Choice]:
    """The cheapest neighbour in ``low..high`` of every node; the one of the middle node splits both ranges."""
    if first > last:
        return
    node = (first + last) // 2
    waste, best = min((cost(node, neighbour), neighbour) for neighbour in range(low, high + 1))
    yield node, waste, best
    yield from _monotone(cost, first, node - 1, low, best)
    yield from _monotone(cost, node + 1, last, best, high)
