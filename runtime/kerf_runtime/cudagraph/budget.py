"""Which graphs to give up when all together need more memory than they may.  Pure, no torch.

A graph is worth its memory as often as it is replayed, so what goes first is the graph that costs the
most bytes per expected hit.  Before there is any traffic every doubling of the number of tokens is expected
equally often, and batches of decodes as often as mixed ones.  The decision is made on the estimate, before anything is recorded: a driver
keeps what a graph has had until the process ends.  Where the estimate was too low it is made again on the
measured bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf

from kerf_runtime.config.compilation import CUDAGraphMode
from kerf_runtime.cudagraph.descriptor import GraphKey
from kerf_runtime.cudagraph.drops import DroppedGraph

__all__ = ["BudgetDecision", "expected_hits", "fit_budget"]


@dataclass(frozen=True)
class BudgetDecision:
    """What stays and what goes.

    Attributes:
        kept: in the order of the question.
        dropped: in the order in which they were given up.
        kept_bytes: of what stays; at most the budget.
    """

    kept: tuple[GraphKey, ...]
    dropped: tuple[DroppedGraph, ...]
    kept_bytes: int


def fit_budget(
    measured: Mapping[GraphKey, int],
    budget: int,
    *,
    expected_hits: Mapping[GraphKey, float] | None = None,
) -> BudgetDecision:
    """Drop graphs, costliest per expected hit first, until the rest fits.

    Graphs that hold no bytes of their own are kept: giving them up gains nothing.

    Args:
        measured: bytes of every graph.
        budget: most bytes of all together.
        expected_hits: how often each is expected to be replayed, in any unit; a graph that is missing
            is expected never. All alike if None.
    """

    def cost(key: GraphKey) -> tuple[float, int, GraphKey]:
        hits = 1.0 if expected_hits is None else expected_hits.get(key, 0.0)
        per_hit = measured[key] / hits if hits > 0 else inf
        return per_hit, measured[key], key

    total = sum(measured.values())
    dropped: dict[GraphKey, DroppedGraph] = {}
    for key in sorted((key for key, size in measured.items() if size > 0), key=cost, reverse=True):
        if total <= budget:
            break
        dropped[key] = DroppedGraph(key, measured[key])
        total -= measured[key]
    kept = tuple(key for key in measured if key not in dropped)
    return BudgetDecision(kept, tuple(dropped.values()), total)


def expected_hits(graphs: Iterable[GraphKey]) -> dict[GraphKey, float]:
    """How often each graph is replayed where every doubling of the number of tokens is equally likely.

    A batch of n tokens, which comes with a weight of 1/n, runs in the smallest graph of its kind that holds it.
    """
    below: dict[tuple[CUDAGraphMode, bool], int] = {}
    hits: dict[GraphKey, float] = {}
    for mode, descriptor in sorted(graphs, key=lambda key: key[1]):
        kind, size = (mode, descriptor.uniform_decode), descriptor.num_tokens
        hits[mode, descriptor] = sum(1 / n for n in range(below.get(kind, 0) + 1, size + 1))
        below[kind] = size
    return hits
