"""A compiled piece as the engine calls it: one artifact per shape, chosen by the number of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import SymInt, Tensor

from kerf_runtime.compilation.backends.interface import PieceCall
from kerf_runtime.cudagraph.emulated import record_opaque_call
from kerf_runtime.errors import CompileError

__all__ = ["PiecewiseBackend", "TokenInput", "find_token_input"]


@dataclass(frozen=True)
class TokenInput:
    """Where a piece sees the number of tokens: input ``index`` itself, or its dimension ``dim``."""

    index: int
    dim: int | None

    def read(self, inputs: Sequence[Any]) -> int:
        """The number of tokens in a call with ``inputs``."""
        value = inputs[self.index]
        return int(value if self.dim is None else value.shape[self.dim])


def find_token_input(example_values: Sequence[Any]) -> TokenInput | None:
    """The first input of a piece that shows the number of tokens, or None for a piece without one."""
    for index, value in enumerate(example_values):
        if isinstance(value, SymInt) and value.node.expr.is_Symbol:
            return TokenInput(index, None)
        if isinstance(value, Tensor):
            for dim, size in enumerate(value.shape):
                if isinstance(size, SymInt) and size.node.expr.is_Symbol:
                    return TokenInput(index, dim)
    return None


class PiecewiseBackend:
    """Calls the artifact that was compiled for the number of tokens, else the general one.

    Args:
        general: the piece for any number of tokens.
        static: number of tokens -> the piece compiled for exactly that many.
        tokens: where the number is; needed if ``static`` is not empty.
        fingerprint: identity of the piece's program.
        recordable: whether an emulated static graph may have to record the call.
    """

    def __init__(
        self,
        general: PieceCall,
        fingerprint: str,
        *,
        static: Mapping[int, PieceCall] | None = None,
        tokens: TokenInput | None = None,
        recordable: bool = True,
    ) -> None:
        self.fingerprint = fingerprint
        self._general = general
        self._static = dict(static or {})
        self._tokens = tokens
        self._first_run = True
        self._recordable = recordable
        if self._static and tokens is None:
            raise CompileError(
                f"piece {fingerprint} has static sizes, but no input that shows the number of tokens"
            )

    @property
    def direct(self) -> PieceCall | None:
        """What may be called instead, with one list, if nothing is to be chosen or recorded here."""
        return None if self._static or self._recordable else self._general

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        call = self._general
        if self._tokens is not None and self._static:
            if self._first_run:  # profiling: the largest batch, whatever sizes were compiled
                self._first_run = False
            else:
                call = self._static.get(self._tokens.read(inputs), call)
        return record_opaque_call(call, inputs)
