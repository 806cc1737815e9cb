"""Which graphs to give up when all together need more memory than they may.  Pure, no torch.

A graph is worth its memory as often as it is replayed, so what goes first is the graph that costs the
most bytes per expected hit.  The decision is made on the estimate, before anything is recorded: a driver
keeps what a graph has had until the process ends.  Where the estimate was too low it is made again on the
measured bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from kerf_runtime.config.compilation import CUDAGraphMode
from kerf_runtime.cudagraph.descriptor import GraphKey
from kerf_runtime.reasons import ConfigReason, ReasonedChange

__all__ = ["BudgetDecision", "DroppedGraph", "budget_changes", "fit_budget"]


@dataclass(frozen=True)
class DroppedGraph:
    """A graph that was given up, and the bytes that it would take or had taken."""

    key: GraphKey
    bytes: int
    reason: ConfigReason = ConfigReason.MEMORY_BUDGET

    def to_json(self) -> dict[str, Any]:
        """As ``/debug/graphs`` shows it."""
        mode, descriptor = self.key
        return {
            "mode": mode.value,
            "num_tokens": descriptor.num_tokens,
            "uniform_decode": descriptor.uniform_decode,
            "bytes": self.bytes,
            "reason": self.reason.value,
        }


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


def budget_changes(
    mode: CUDAGraphMode, kept: Sequence[GraphKey], dropped: Sequence[DroppedGraph], budget: int
) -> tuple[ReasonedChange, ...]:
    """What the drops change in the effective configuration; empty if nothing was dropped.

    The lists of sizes are in the message: what was requested and what is in force are short texts in the
    status of a ModelDeployment.
    """
    if not dropped:
        return ()
    gone = [graph.key for graph in dropped]
    requested, effective = (f"{count} graphs" for count in (len(kept) + len(gone), len(kept)))
    why = f"graphMemoryBudget is {budget} bytes; dropped {_sizes(gone)}; kept {_sizes(kept) or 'none'}"
    changes = [
        ReasonedChange("captureSizes", requested, effective, ConfigReason.MEMORY_BUDGET, why)
    ]
    if not kept:
        changes.append(
            ReasonedChange(
                "cudagraphMode",
                str(mode),
                str(CUDAGraphMode.NONE),
                ConfigReason.MEMORY_BUDGET,
                why,
            )
        )
    return tuple(changes)


def _sizes(keys: Sequence[GraphKey]) -> str:
    """``FULL decode 1 2 4, PIECEWISE mixed 1 2``."""
    groups: dict[str, list[int]] = {}
    for mode, descriptor in sorted(keys):
        groups.setdefault(f"{mode} {descriptor.kind}", []).append(descriptor.num_tokens)
    return ", ".join(f"{name} {' '.join(map(str, sizes))}" for name, sizes in groups.items())
