"""The graph passes: which exist, in which order they run, which are on, and how they enter the cache key.

Pure, so that the operator computes the same key as the runtime without Inductor: a pass is identified by
its name and a version that is raised with every change of what the pass does.  The passes themselves are
in ``kerf_runtime.compilation.passes``, which takes names and versions from here.
"""

from __future__ import annotations

import hashlib
from typing import ClassVar

from pydantic import Field, ValidationInfo, field_validator

from kerf_runtime.config.base import ConfigModel

__all__ = [
    "DISTRIBUTED_PASSES",
    "FUSION_PASSES",
    "PASS_VERSIONS",
    "PERMANENT_PASSES",
    "PassConfig",
    "enabled_passes",
    "pass_uuid",
    "pass_uuids",
]

PASS_VERSIONS: dict[str, int] = {
    "unfuse_matrix_adds": 1,
    "noop_elimination": 1,
    "norm_quant_fusion": 1,
    "activation_quant_fusion": 1,
    "attention_quant_fusion": 1,
    "fix_functionalization": 1,
}
"""Version of every pass, in the order in which they run.  Raise it when a pass changes what it writes.

Those in ``PERMANENT_PASSES`` always run, each other one is switched by the field of ``PassConfig`` with the
same name.
"""

PERMANENT_PASSES: tuple[str, ...] = ("unfuse_matrix_adds", "fix_functionalization")
"""Passes without a switch: the first and the last."""

FUSION_PASSES: tuple[str, ...] = (
    "norm_quant_fusion",
    "activation_quant_fusion",
    "attention_quant_fusion",
)
"""Passes that match patterns, which reshapes that change nothing would hide from them."""

DISTRIBUTED_PASSES: tuple[str, ...] = (
    "sequence_parallelism",
    "async_tensor_parallelism",
    "all_reduce_fusion",
)
"""Fields whose passes come with tensor parallelism."""


def _needs_tensor_parallelism(field: str) -> str:
    return f"{field} needs tensor parallelism, which does not exist yet: leave it out or set it to false"


class PassConfig(ConfigModel):
    """Graph passes that run between the trace and Inductor's code generation."""

    cel_rules: ClassVar[tuple[tuple[str, ...], ...]] = tuple(
        (f"!self.{field}", _needs_tensor_parallelism(field))
        for field in ("sequenceParallelism", "asyncTensorParallelism", "allReduceFusion")
    )

    noop_elimination: bool = Field(
        True,
        description=(
            "Remove reshapes and slices that change nothing. The fusions may find nothing without it. Default true."
        ),
    )
    norm_quant_fusion: bool = Field(
        False,
        description="Fuse RMSNorm, with or without the add before it, with the FP8 quantisation after it. Default false.",
    )
    activation_quant_fusion: bool = Field(
        False, description="Fuse SiLU-and-mul with the FP8 quantisation after it. Default false."
    )
    attention_quant_fusion: bool = Field(
        False,
        description=(
            "Let attention write FP8 directly. Only where attention is inside a compiled piece, so splittingOps "
            "must not name it. Default false."
        ),
    )
    sequence_parallelism: bool = Field(
        False,
        description="Split all-reduces for sequence parallelism. Refused until tensor parallelism exists. Default false.",
    )
    async_tensor_parallelism: bool = Field(
        False,
        description="Overlap communication with GEMMs. Refused until tensor parallelism exists. Default false.",
    )
    all_reduce_fusion: bool = Field(
        False,
        description="Fuse all-reduce, add and RMSNorm. Refused until tensor parallelism exists. Default false.",
    )

    @field_validator(*DISTRIBUTED_PASSES)
    @classmethod
    def _not_yet(cls, value: bool, info: ValidationInfo) -> bool:
        if value:
            field = cls.model_fields[info.field_name or ""].alias or ""
            raise ValueError(_needs_tensor_parallelism(field))
        return value

    @classmethod
    def off(cls) -> PassConfig:
        """Every switch off: what is in force where Inductor compiles no pieces."""
        return cls(noop_elimination=False)


def enabled_passes(config: PassConfig) -> tuple[str, ...]:
    """The names of the passes that run, in order; ``fix_functionalization`` is always the last."""
    return tuple(
        name for name in PASS_VERSIONS if name in PERMANENT_PASSES or getattr(config, name)
    )


def pass_uuid(name: str) -> str:
    """64 hex digits that identify what the pass ``name`` does.

    Raises:
        KeyError: there is no such pass.
    """
    return hashlib.sha256(f"{name}:{PASS_VERSIONS[name]}".encode()).hexdigest()


def pass_uuids(config: PassConfig) -> dict[str, str]:
    """The uuid of every pass that runs, in order."""
    return {name: pass_uuid(name) for name in enabled_passes(config)}
