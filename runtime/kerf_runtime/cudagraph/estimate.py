"""How much memory all graphs will need, told by trial recordings of a few.  Pure, no torch.

Where graphs share a pool (CUDA), three things cost memory, and each is known after a trial:

* the pool: what the largest recording allocates, and the largest of those that compute logits; every smaller one
  fits into that;
* what the driver keeps for each graph.  It depends on the nodes, of which small batches often have more, and
  comes in grains, so that one graph seems to cost nothing and the next twice as much: several, from all
  sizes, are recorded for their mean, and more of them where a grain more or less would matter;
* what happens once, such as loading kernels.  No graph gives it back.

Where every graph has buffers of its own (emulated ones), bytes grow linearly with the size, in one way for graphs that
compute logits and in another for those that do not, and two recordings tell each line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from kerf_runtime.cudagraph.descriptor import (
    BatchDescriptor,
    GraphKey,
    GraphKind,
    computes_logits,
    graph_kind,
)

__all__ = ["MemoryEstimate", "Trial", "estimate_memory", "next_trials"]

SAMPLES = 11
"""Graphs of one kind that are recorded at first after the largest, where what one took cannot be told exactly."""

GRAIN = 2 * 2**20
"""Bytes that a driver takes at once, for one graph or for many small ones."""

TOLERANCE = 0.1
"""Of the estimate: how far it may be wrong."""


@dataclass(frozen=True)
class Trial:
    """What recording one graph took.

    Attributes:
        key: of the graph.
        bytes: of the device, or of the graph's own buffers.
        pool: bytes of it that are the shared pool's; 0 where there is none.
        graphs: recorded: one, or one per piece.
        nodes: of all of them.
    """

    key: GraphKey
    bytes: int
    pool: int = 0
    graphs: int = 1
    nodes: int = 0

    @property
    def driver(self) -> int:
        """Bytes outside the pool."""
        return self.bytes - self.pool

    @property
    def plausible(self) -> int:
        """Most bytes that a driver may have taken: twice what was ever measured, and two grains."""
        return self.graphs * 256 * 2**10 + self.nodes * 8 * 2**10 + 2 * GRAIN


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of every graph, and of what all have in common.

    Attributes:
        shared: bytes that are spent once and not given back.
        graphs: bytes of each graph; a graph's share of the pool is what it needs beyond the next smaller one.
        disturbed: whether somebody else took memory of the device during the trials.
    """

    shared: int = 0
    graphs: Mapping[GraphKey, int] = field(default_factory=dict)
    disturbed: bool = False

    def total(self) -> int:
        """Bytes of everything."""
        return self.shared + sum(self.graphs.values())

    def without(self, keys: Sequence[GraphKey]) -> MemoryEstimate:
        """The same without some graphs."""
        left = {key: size for key, size in self.graphs.items() if key not in keys}
        return replace(self, graphs=left)

    def scaled_to(self, total: int) -> MemoryEstimate:
        """The measured ``total`` split between the graphs in proportion to what they were expected to take."""
        expected, left = sum(self.graphs.values()), max(0, total - self.shared)
        graphs, given, seen = {}, 0, 0
        for key, size in self.graphs.items():
            seen += size
            upto = left * seen // expected if expected else 0
            graphs[key], given = upto - given, upto
        return replace(self, shared=total - given, graphs=graphs)


def next_trials(
    plan: Sequence[GraphKey], trials: Sequence[Trial], *, pooled: bool, logits_rows: int = 0
) -> list[GraphKey]:
    """Which graphs of ``plan`` to record next for an estimate, in order; none once it is good enough.

    Args:
        plan: largest first within each kind.
        trials: what was recorded so far.  At first, this is the largest of each kind and some others; then as
            many again, until grains cannot make more than ``TOLERANCE`` of a difference.
        pooled: whether the graphs share a pool of memory.
        logits_rows: of the largest decode graph that computes logits.
    """
    keys: list[GraphKey] = []
    if not trials:
        for group in _by_kind(plan, 0 if pooled else logits_rows).values():
            with_logits = [key for key in group if computes_logits(key, logits_rows)]
            some = _spread(group[1:], SAMPLES) if pooled else group[-1:]
            wanted = {group[0], *with_logits[:1], *some}
            keys += [key for key in group if key in wanted]
        return keys
    if (
        not pooled
        or _doubt(plan, trials) <= TOLERANCE * estimate_memory(plan, trials, pooled=True).total()
    ):
        return []
    tried = {trial.key for trial in trials}
    for group in _by_kind(plan).values():
        left = [key for key in group if key not in tried]
        keys += _spread(left, len(group) - len(left))
    return keys


def estimate_memory(
    plan: Sequence[GraphKey], trials: Sequence[Trial], *, pooled: bool, logits_rows: int = 0
) -> MemoryEstimate:
    """What all graphs of ``plan`` will take.

    Args:
        plan: everything that will be recorded.
        trials: of ``next_trials``, in that order.
        pooled: as for ``next_trials``.
        logits_rows: likewise.
    """
    if not plan:
        return MemoryEstimate()
    if not pooled:
        seen = _trials_by_kind(trials, logits_rows)
        return MemoryEstimate(
            0, {key: _on_line(seen[graph_kind(key, logits_rows)], key) for key in plan}
        )
    seen = _trials_by_kind(trials)
    shared, disturbed = 0, False
    graphs: dict[GraphKey, int] = {}
    for kind, keys in _by_kind(plan).items():
        first, *rest = seen[kind]
        disturbed |= any(trial.driver > trial.plausible for trial in rest)
        sizes = [min(trial.driver, trial.plausible) for trial in rest]
        each = round(sum(sizes) / len(sizes)) if sizes else first.driver
        shared += max(0, first.driver - each)
        graphs.update(dict.fromkeys(keys, each))
    for key, share in _pool_shares(plan, sum(trial.pool for trial in trials)).items():
        graphs[key] += share
    return MemoryEstimate(shared, graphs, disturbed)


def _doubt(plan: Sequence[GraphKey], trials: Sequence[Trial]) -> float:
    """Bytes by which an estimate may be wrong: the trials of each kind filled one grain more, or less."""
    groups = _by_kind(plan)
    return sum(
        GRAIN * (len(groups[kind]) - len(tried)) / (len(tried) - 1)
        for kind, tried in _trials_by_kind(trials).items()
        if len(tried) > 1
    )


def _spread(keys: Sequence[GraphKey], count: int) -> list[GraphKey]:
    """Up to ``count`` of them, at equal distances, from the first to the last."""
    if len(keys) <= count:
        return list(keys)
    return [keys[index * (len(keys) - 1) // (count - 1)] for index in range(count)]


def _by_kind(plan: Sequence[GraphKey], logits_rows: int = 0) -> dict[GraphKind, list[GraphKey]]:
    groups: dict[GraphKind, list[GraphKey]] = {}
    for key in plan:
        groups.setdefault(graph_kind(key, logits_rows), []).append(key)
    return groups


def _trials_by_kind(trials: Sequence[Trial], logits_rows: int = 0) -> dict[GraphKind, list[Trial]]:
    seen: dict[GraphKind, list[Trial]] = {}
    for trial in trials:
        seen.setdefault(graph_kind(trial.key, logits_rows), []).append(trial)
    return seen


def _on_line(trials: Sequence[Trial], key: GraphKey) -> int:
    """The bytes at the size of ``key`` on the line through the first and the last trial."""
    (_, large), (_, small) = trials[0].key, trials[-1].key
    width = large.num_tokens - small.num_tokens
    slope = (trials[0].bytes - trials[-1].bytes) / width if width else 0.0
    return round(trials[-1].bytes + slope * (key[1].num_tokens - small.num_tokens))


def _pool_shares(plan: Sequence[GraphKey], pool: int) -> dict[GraphKey, int]:
    """Of one graph of each size: the part of the pool by which it is larger than the next smaller size's."""
    one_of: dict[int, GraphKey] = {}
    for key in plan:
        descriptor: BatchDescriptor = key[1]
        one_of.setdefault(descriptor.num_tokens, key)
    top = max(one_of)
    shares, below = {}, 0
    for size in sorted(one_of):
        upto = pool * size // top
        shares[one_of[size]], below = upto - below, upto
    return shares
