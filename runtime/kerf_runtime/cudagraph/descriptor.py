"""The key of a recorded graph and the dispatcher's answer.  Pure, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from kerf_runtime.config.compilation import CUDAGraphMode
from kerf_runtime.reasons import DispatchReason

__all__ = ["BatchDescriptor", "DispatchDecision"]


@dataclass(frozen=True, order=True)
class BatchDescriptor:
    """What a recorded graph was recorded for.

    Attributes:
        num_tokens: rows of the batch, padding included.
        uniform_decode: whether every sequence contributes exactly one token.
    """

    num_tokens: int
    uniform_decode: bool = False

    def non_uniform(self) -> BatchDescriptor:
        """The same size as a batch of any kind."""
        return BatchDescriptor(self.num_tokens, False)


@dataclass(frozen=True)
class DispatchDecision:
    """How one step runs.

    ``descriptor.num_tokens`` is the padded size to run, never below the number of real tokens.
    """

    mode: CUDAGraphMode
    descriptor: BatchDescriptor
    reason: DispatchReason
