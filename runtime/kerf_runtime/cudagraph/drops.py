"""The graphs that were given up, and how that is told in log, metric, ``/debug/graphs`` and status.  Pure, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kerf_runtime.config.compilation import CUDAGraphMode
from kerf_runtime.cudagraph.descriptor import GraphKey, graph_names
from kerf_runtime.reasons import ConfigReason, ReasonedChange

__all__ = ["DroppedGraph", "Drops", "dropped_changes"]

_MOST_WORDS = 1000
"""Characters of an error in a status."""


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


class Drops:
    """What was given up so far.

    Args:
        mode: that was in force before.
    """

    def __init__(self, mode: CUDAGraphMode) -> None:
        self._mode = mode
        self._why: dict[ConfigReason, str] = {}
        self.graphs: list[DroppedGraph] = []
        """In the order in which they were given up."""

    def add(self, graphs: Sequence[DroppedGraph], why: str) -> None:
        """Note graphs; of several reasons of one kind the first ``why`` is told."""
        for graph in graphs:
            self._why.setdefault(graph.reason, why[:_MOST_WORDS])
        self.graphs += graphs

    def changes(self, kept: Sequence[GraphKey]) -> tuple[ReasonedChange, ...]:
        """See ``dropped_changes``."""
        return dropped_changes(self._mode, kept, self.graphs, self._why)


def dropped_changes(
    mode: CUDAGraphMode,
    kept: Sequence[GraphKey],
    dropped: Sequence[DroppedGraph],
    why: Mapping[ConfigReason, str],
) -> tuple[ReasonedChange, ...]:
    """What the drops change in the effective configuration, by reason; empty if nothing was dropped.

    The lists of sizes are in the message: what was requested and what is in force are short texts in the
    status of a ModelDeployment.

    Args:
        mode: that was in force.
        kept: graphs that are left in the plan.
        dropped: in the order in which they were given up.
        why: for people, for every reason among ``dropped``.
    """
    changes: list[ReasonedChange] = []
    left = len(kept) + len(dropped)
    for reason in dict.fromkeys(graph.reason for graph in dropped):
        gone = [graph.key for graph in dropped if graph.reason is reason]
        before, left = left, left - len(gone)
        message = f"{why[reason]}; dropped {graph_names(gone)}; kept {graph_names(kept) or 'none'}"
        changes.append(
            ReasonedChange("captureSizes", f"{before} graphs", f"{left} graphs", reason, message)
        )
    if changes and not kept:
        last = changes[-1]
        changes.append(
            ReasonedChange(
                "cudagraphMode", str(mode), str(CUDAGraphMode.NONE), last.reason, last.message
            )
        )
    return tuple(changes)
