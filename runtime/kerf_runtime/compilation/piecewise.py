"""A compiled piece as the engine calls it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kerf_runtime.cudagraph.emulated import record_opaque_call

__all__ = ["CompiledPiece"]


class CompiledPiece:
    """Calls one loaded artifact.

    Args:
        call: takes the list of inputs and empties it, returns the outputs.
        fingerprint: identity of the piece's program.
    """

    def __init__(self, call: Callable[[list[Any]], Sequence[Any]], fingerprint: str) -> None:
        self._call = call
        self.fingerprint = fingerprint

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        return record_opaque_call(self._call, inputs)
