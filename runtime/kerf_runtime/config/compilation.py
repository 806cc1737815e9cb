"""What to compile and how to capture it: levels, back ends, passes, CUDA-graph modes, sizes."""

from __future__ import annotations

import re
from enum import IntEnum, StrEnum
from typing import Annotated, ClassVar, Self

from pydantic import (
    AfterValidator,
    Field,
    PlainValidator,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from kerf_runtime.config.base import ConfigModel, Quantity, parse_quantity
from kerf_runtime.config.custom_ops import CUSTOM_OP_NAMES, CustomOpChoice, resolve_custom_ops
from kerf_runtime.config.passes import PassConfig
from kerf_runtime.errors import ConfigError

__all__ = [
    "ATTENTION_OPS",
    "CAPTURE_SIZES",
    "MAX_SIZE",
    "MIXER_OPS",
    "SIZE_RULES",
    "CUDAGraphMode",
    "CaptureMode",
    "CompilationConfig",
    "CompilationLevel",
    "CompilerBackendName",
    "InductorValue",
    "PassConfig",
    "check_sizes",
]

ATTENTION_OPS: tuple[str, ...] = ("kerf::attention",)
"""Default splitting ops: the graph is cut at every call of one of them."""

MIXER_OPS: tuple[str, ...] = ("kerf::mamba_mixer",)
"""The operators of state-space layers.  Where attention is a splitting op, so are those of the model: they
stand where attention stands in other layers, and the document need not know which model it is about."""

InductorValue = bool | int | Annotated[float, Field(allow_inf_nan=False)] | str
"""JSON values only: infinity has no JSON form, and the document travels to the pods as JSON."""

_OPERATOR = r"^[A-Za-z_][A-Za-z0-9_]*::[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)?$"


def _operator_name(name: str) -> str:
    if len(name) > 256 or not re.fullmatch(_OPERATOR, name):
        raise ValueError("an operator is written namespace::name or namespace::name.overload")
    return name


OperatorName = Annotated[
    str,
    AfterValidator(_operator_name),
    WithJsonSchema({"type": "string", "pattern": _OPERATOR, "maxLength": 256}),
]

MAX_SIZE = 65536
"""Largest number of tokens that a step, a graph or a static compilation can have."""

CAPTURE_SIZES = "cudagraph_capture_sizes"
"""The entry of ``compileSizes`` that stands for every capture size."""


def _compile_size(value: object) -> int | str:
    if value == CAPTURE_SIZES:
        return CAPTURE_SIZES
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_SIZE:
        return value
    raise ValueError(f"a size is a number of tokens from 1 to {MAX_SIZE}, or {CAPTURE_SIZES}")


CompileSize = Annotated[
    int | str,
    PlainValidator(_compile_size),
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "minimum": 1,
            "maximum": MAX_SIZE,
            "pattern": f"^{CAPTURE_SIZES}$",
            "maxLength": len(CAPTURE_SIZES),
        }
    ),
]
"""A number of tokens or ``cudagraph_capture_sizes``; the schema shows the same rule to the API server."""


class CompilationLevel(IntEnum):
    """How much of the compiler is used.  1 and 2 are for debugging and never cached."""

    NO_COMPILATION = 0
    DYNAMO_AS_IS = 1
    DYNAMO_ONCE = 2
    PIECEWISE = 3


class CompilerBackendName(StrEnum):
    """What turns a piece of the graph into something that runs."""

    INDUCTOR = "inductor"
    EAGER = "eager"


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


class CaptureMode(StrEnum):
    """When graphs are recorded."""

    EAGER = "eager"
    PROGRESSIVE = "progressive"


class CompilationConfig(ConfigModel):
    """How the model is compiled, split and captured."""

    cel_rules: ClassVar[tuple[tuple[str, ...], ...]] = (
        (
            "!has(self.customOps) || !('all' in self.customOps && 'none' in self.customOps)",
            "customOps: all and none contradict each other",
        ),
        *(
            (
                f"!has(self.customOps) || !('+{name}' in self.customOps && '-{name}' in self.customOps)",
                f"customOps: +{name} and -{name} contradict each other",
            )
            for name in CUSTOM_OP_NAMES
        ),
    )

    level: CompilationLevel = Field(
        CompilationLevel.PIECEWISE,
        description=(
            "0 runs eagerly. 1 is torch.compile as it is, which may trace again (for debugging). 2 traces once and "
            "runs the compiled forward without guards (for debugging). 3 traces once, splits at the splitting ops, "
            "compiles every piece and caches the result. Only level 3 uses the compile cache. Default 3."
        ),
    )
    backend: CompilerBackendName = Field(
        CompilerBackendName.INDUCTOR,
        description=(
            "What compiles the traced graph. inductor: optimised kernels. eager: the graph as it was traced, for "
            "debugging. Default inductor."
        ),
    )
    custom_ops: list[CustomOpChoice] | None = Field(
        None,
        max_length=16,
        description=(
            "Layers that run as custom operators instead of ATen operators that Inductor can fuse: all or none, "
            f"then +name and -name for {', '.join(CUSTOM_OP_NAMES)}. Default: none when Inductor compiles, else all."
        ),
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
    capture_sizes: list[Annotated[int, Field(strict=True, ge=1, le=MAX_SIZE)]] | None = Field(
        None,
        min_length=1,
        max_length=256,
        description=(
            "Batch sizes, in tokens, that get a recorded graph. Duplicates are dropped and the list is sorted. "
            "Default: 1, 2, 4, then multiples of 8 up to maxNumSeqs. Changing it never recompiles, unless compileSizes names cudagraph_capture_sizes."
        ),
    )
    graph_memory_budget: Quantity | None = Field(
        None,
        description=(
            "Most memory that all recorded graphs may hold, as a quantity of bytes. When the estimate or the measured "
            "memory is above it, graphs are dropped, costliest per expected hit first, and their batches run in another graph or in "
            "none; what was dropped is in /debug/graphs. Every doubling of the number of tokens is expected equally often, "
            "and decode batches as often as mixed ones. Default: no limit."
        ),
    )
    capture_mode: CaptureMode = Field(
        CaptureMode.EAGER,
        description=(
            "When graphs are recorded. eager: all before the pod is ready. progressive: the largest and the powers of "
            "two before, the others one by one after each step, those first that save the most padding; steps do not "
            "overlap until all are there or the rest waits for an idle engine. A graph that cannot be recorded then is dropped, and "
            "where memory ran out all that are left. Default eager."
        ),
    )
    capture_delay_milliseconds: int = Field(
        50,
        strict=True,
        ge=1,
        le=60_000,
        description=(
            "Most milliseconds by which a progressive capture may delay each step. A warm-up or a recording is expected to take what "
            "the last one of at least its size took. Graphs for which that is longer are recorded before the pod is ready; "
            "if it becomes longer later, they wait until no request is there. Default 50."
        ),
    )
    compile_sizes: list[CompileSize] | None = Field(
        None,
        max_length=64,
        description=(
            "Batch sizes, in tokens, for which every piece is also compiled with static shapes, tuned for exactly "
            "that size. cudagraph_capture_sizes stands for every capture size, which then becomes part of the cache "
            "key. Duplicates are dropped and the list is sorted. Level 3 with inductor only. Default: none."
        ),
    )
    cudagraph_copy_inputs: bool = Field(
        False,
        description=(
            "Copy the inputs of every recorded piece into buffers of its own. Only for callers whose inputs move; "
            "the engine's do not. Default false."
        ),
    )
    passes: PassConfig = Field(
        PassConfig(),
        description="Graph passes that run before Inductor generates code. Level 3 with inductor only.",
    )
    splitting_ops: list[OperatorName] | None = Field(
        None,
        max_length=64,
        description=(
            "Operators at which the graph is cut, written namespace::name, or namespace::name.overload for one of "
            "its overloads; the model must call every one. Duplicates are dropped and the list is sorted. "
            "Default: the attention operator, kerf::attention, with which the state-space mixer of a hybrid model, "
            "kerf::mamba_mixer, is cut out too. An empty list compiles the model as one piece."
        ),
    )
    inductor_config: dict[str, InductorValue] | None = Field(
        None,
        max_length=64,
        description=(
            "Options passed to the Inductor compiler; backend inductor only. Unknown options and values of another "
            "type are errors of kerf validate --model-path, and when the model is compiled. Those that time candidates, "
            "such as max_autotune, are in force for compileSizes only."
        ),
    )
    strict: bool = Field(
        False,
        description="Refuse to start instead of running with a lower level or mode than requested. Default false.",
    )

    @field_validator("level", mode="before")
    @classmethod
    def _a_number(cls, level: object) -> object:
        if isinstance(level, bool) or not isinstance(level, int):
            raise ValueError("a level is a number from 0 to 3")
        return level

    @field_validator("splitting_ops")
    @classmethod
    def _sorted_ops(cls, names: list[str] | None) -> list[str] | None:
        return None if names is None else sorted(set(names))

    @model_validator(mode="after")
    def _eager_has_no_options(self) -> Self:
        if self.backend is CompilerBackendName.EAGER and self.inductor_config:
            raise ValueError("inductorConfig: backend eager has no options; remove them")
        return self

    @field_validator("capture_sizes")
    @classmethod
    def _sorted_sizes(cls, sizes: list[int] | None) -> list[int] | None:
        return None if sizes is None else sorted(set(sizes))

    @model_validator(mode="after")
    def _custom_ops_agree(self) -> Self:
        try:
            resolve_custom_ops(self.custom_ops, inductor=True)
        except ConfigError as error:
            raise ValueError(f"customOps: {error.what}") from None
        return self

    @property
    def graph_memory_bytes(self) -> int | None:
        """Most memory of all graphs in bytes; None without a limit."""
        budget = self.graph_memory_budget
        return None if budget is None else parse_quantity(budget)

    @property
    def compiles_capture_sizes(self) -> bool:
        """Whether every capture size is compiled with static shapes, so that they are part of the key."""
        return CAPTURE_SIZES in (self.compile_sizes or ())


SIZE_RULES: tuple[tuple[str, ...], ...] = (
    (
        "!has(self.compilation.captureSizes) || "
        "((self.compilation.cudagraphMode == 'NONE' || self.engine.enforceEager) && "
        "!(has(self.compilation.compileSizes) && "
        "self.compilation.compileSizes.exists(s, type(s) == string))) || "
        "self.compilation.captureSizes.all(s, s <= self.engine.maxNumBatchedTokens)",
        "compilation.captureSizes holds a size above engine.maxNumBatchedTokens: no step is that large",
        "'compilation.captureSizes holds %d, above engine.maxNumBatchedTokens %d: no step is that large'"
        ".format([self.compilation.captureSizes.max(), self.engine.maxNumBatchedTokens])",
    ),
    (
        "!has(self.compilation.compileSizes) || "
        "self.compilation.compileSizes.all(s, type(s) == string || s <= self.engine.maxNumBatchedTokens)",
        "compilation.compileSizes holds a size above engine.maxNumBatchedTokens: no step is that large",
        "'compilation.compileSizes holds %d, above engine.maxNumBatchedTokens %d: no step is that large'"
        ".format([self.compilation.compileSizes.filter(s, type(s) == int && "
        "s > self.engine.maxNumBatchedTokens)[0], self.engine.maxNumBatchedTokens])",
    ),
)
"""``check_sizes`` as CEL on the whole spec, each with a message and an expression that names the numbers."""


def check_sizes(config: CompilationConfig, *, limit: int, enforce_eager: bool) -> None:
    """Refuse sizes above ``limit``, the most tokens of a step; capture sizes only where they are used.

    Raises:
        ValueError: names the field, the size and the limit.
    """
    captured = config.cudagraph_mode is not CUDAGraphMode.NONE and not enforce_eager
    if captured or config.compiles_capture_sizes:
        _check_fit("captureSizes", (config.capture_sizes or [])[-1:], limit)
    static = [size for size in config.compile_sizes or [] if isinstance(size, int)]
    _check_fit("compileSizes", static, limit)


def _check_fit(field: str, sizes: list[int], limit: int) -> None:
    above = next((size for size in sizes if size > limit), None)
    if above is not None:
        raise ValueError(
            f"compilation.{field} holds {above}, above engine.maxNumBatchedTokens {limit}: "
            "no step is that large"
        )
