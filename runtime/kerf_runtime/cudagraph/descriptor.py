"""The key of a recorded graph and the dispatcher's answer.  Pure, no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kerf_runtime.config.compilation import CUDAGraphMode
from kerf_runtime.reasons import DispatchReason

__all__ = [
    "BatchDescriptor",
    "DispatchDecision",
    "GraphKey",
    "GraphKind",
    "computes_logits",
    "graph_kind",
    "graph_name",
    "graph_names",
]


@dataclass(frozen=True, order=True)
class BatchDescriptor:
    """What a recorded graph was recorded for.

    Attributes:
        num_tokens: rows of the batch, padding included.
        uniform_decode: whether every sequence contributes exactly one token.
    """

    num_tokens: int
    uniform_decode: bool = False

    @property
    def kind(self) -> str:
        """``decode`` or ``mixed``."""
        return "decode" if self.uniform_decode else "mixed"


GraphKey = tuple[CUDAGraphMode, BatchDescriptor]
"""What a graph is recorded for."""

GraphKind = tuple[CUDAGraphMode, bool, bool]
"""Mode, whether for uniform decode batches, and whether it computes logits, for which it has buffers."""


def computes_logits(key: GraphKey, rows: int) -> bool:
    """Whether a graph computes logits beside hidden states: full graphs of decode batches up to ``rows`` do."""
    mode, descriptor = key
    decode = mode is CUDAGraphMode.FULL and descriptor.uniform_decode
    return decode and descriptor.num_tokens <= rows


def graph_kind(key: GraphKey, logits_rows: int) -> GraphKind:
    """What a graph has in common with those of other sizes, of which a larger one needs more memory."""
    mode, descriptor = key
    return mode, descriptor.uniform_decode, computes_logits(key, logits_rows)


def graph_name(key: GraphKey) -> str:
    """For people: ``FULL decode 8``."""
    mode, descriptor = key
    return f"{mode} {descriptor.kind} {descriptor.num_tokens}"


def graph_names(keys: Iterable[GraphKey]) -> str:
    """For people: ``FULL decode 1 2 4, PIECEWISE mixed 1 2``."""
    groups: dict[str, list[int]] = {}
    for mode, descriptor in sorted(keys):
        groups.setdefault(f"{mode} {descriptor.kind}", []).append(descriptor.num_tokens)
    return ", ".join(f"{name} {' '.join(map(str, sizes))}" for name, sizes in groups.items())


@dataclass(frozen=True)
class DispatchDecision:
    """How one step runs.

    ``descriptor.num_tokens`` is the padded size to run, never below the number of real tokens.
    """

    mode: CUDAGraphMode
    descriptor: BatchDescriptor
    reason: DispatchReason
