"""What to compile and how to capture it: levels, CUDA-graph modes, capture sizes."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Annotated

from pydantic import Field, field_validator

from kerf_runtime.config.base import ConfigModel

__all__ = [
    "ATTENTION_OPS",
    "CUDAGraphMode",
    "CompilationConfig",
    "CompilationLevel",
    "InductorValue",
]

ATTENTION_OPS: tuple[str, ...] = ("kerf::attention",)
"""Default splitting ops: the graph is cut at every call of one of them."""

InductorValue = bool | int | Annotated[float, Field(allow_inf_nan=False)] | str
"""JSON values only: infinity has no JSON form, and the document travels to the pods as JSON."""


class CompilationLevel(IntEnum):
    """How much of the compiler is used."""

    NO_COMPILATION = 0
    PIECEWISE = 3


class CUDAGraphMode(StrEnum):
    """Which batches are recorded as static graphs, and whether whole or piece by piece.

    A mode is a pair (mode of uniform decode batches, mode of mixed batches); the plain modes use
    the same for both.
    """

    NONE = "NONE"
    PIECEWISE = "PIECEWISE"
    FULL = "FULL"
    FULL_DECODE_ONLY = "FULL_DECODE_ONLY"
    FULL_AND_PIECEWISE = "FULL_AND_PIECEWISE"

    def decode_mode(self) -> CUDAGraphMode:
        """Mode of a uniform decode batch: NONE, PIECEWISE or FULL."""
        if self in (CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE):
            return CUDAGraphMode.FULL
        return self

    def mixed_mode(self) -> CUDAGraphMode:
        """Mode of every other batch: NONE, PIECEWISE or FULL."""
        if self is CUDAGraphMode.FULL_DECODE_ONLY:
            return CUDAGraphMode.NONE
        if self is CUDAGraphMode.FULL_AND_PIECEWISE:
            return CUDAGraphMode.PIECEWISE
        return self

    def has_mode(self, mode: CUDAGraphMode) -> bool:
        """Whether decode or mixed batches run in ``mode``."""
        return mode in (self.decode_mode(), self.mixed_mode())

    def separate_routine(self) -> bool:
        """Whether decode and mixed batches are recorded differently."""
        return self.decode_mode() is not self.mixed_mode()

    def requires_piecewise_compilation(self) -> bool:
        """Whether some batches replay piece by piece, which needs a split graph."""
        return self.has_mode(CUDAGraphMode.PIECEWISE)


class CompilationConfig(ConfigModel):
    """How the model is compiled, split and captured."""

    level: CompilationLevel = Field(
        CompilationLevel.PIECEWISE,
        description="0 runs eagerly; 3 traces once, splits at the splitting ops and compiles every piece. Default 3.",
    )
    cudagraph_mode: CUDAGraphMode = Field(
        CUDAGraphMode.FULL_AND_PIECEWISE,
        description=(
            "Which batches replay a recorded graph. NONE: no graphs. PIECEWISE: the pieces between attention calls. "
            "FULL: the whole forward. FULL_DECODE_ONLY: the whole forward for decode batches, nothing for mixed ones. "
            "FULL_AND_PIECEWISE: whole for decode, pieces for mixed batches. Default FULL_AND_PIECEWISE. "
            "What is really in force, and why, is in status.graphs."
        ),
    )
    capture_sizes: list[Annotated[int, Field(ge=1, le=65536)]] | None = Field(
        None,
        min_length=1,
        max_length=256,
        description=(
            "Batch sizes, in tokens, that get a recorded graph. Duplicates are dropped and the list is sorted. "
            "Default: 1, 2, 4, then multiples of 8 up to maxNumSeqs. Changing it never recompiles."
        ),
    )
    splitting_ops: list[Annotated[str, Field(min_length=1, max_length=256)]] | None = Field(
        None,
        max_length=64,
        description=(
            "Operators at which the graph is cut, written namespace::name. Default: the attention operator. "
            "An empty list compiles the model as one piece."
        ),
    )
    inductor_config: dict[str, InductorValue] | None = Field(
        None,
        max_length=64,
        description="Options passed to the Inductor compiler. Unknown options are errors when the model is compiled.",
    )
    strict: bool = Field(
        False,
        description="Refuse to start instead of running with a lower level or mode than requested. Default false.",
    )

    @field_validator("capture_sizes")
    @classmethod
    def _sorted_sizes(cls, sizes: list[int] | None) -> list[int] | None:
        return None if sizes is None else sorted(set(sizes))
