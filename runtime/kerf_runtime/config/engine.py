"""Engine limits: data type, lengths, batch sizes, memory."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from kerf_runtime.config.base import QUANTITY_PATTERN, ConfigModel, parse_quantity, text_only

__all__ = ["DType", "EngineConfig", "Quantization"]

AUTO_MEMORY = "auto"


def _check_memory(text: str) -> str:
    if text != AUTO_MEMORY:
        try:
            parse_quantity(text)
        except ValueError as error:
            raise ValueError(f"{error}, or auto") from None
    return text


MemoryOrAuto = Annotated[
    str,
    BeforeValidator(text_only),
    AfterValidator(_check_memory),
    WithJsonSchema({"type": "string", "pattern": f"^(auto|{QUANTITY_PATTERN})$", "maxLength": 32}),
]
"""A quantity of bytes, or ``auto``."""


class DType(StrEnum):
    """Data type of weights and activations."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Quantization(StrEnum):
    """How weights are quantised when they are loaded."""

    FP8 = "fp8"


class EngineConfig(ConfigModel):
    """Limits of the engine inside one pod."""

    cel_rules: ClassVar[tuple[tuple[str, ...], ...]] = (
        (
            "self.maxNumBatchedTokens >= self.maxNumSeqs",
            "maxNumBatchedTokens must not be below maxNumSeqs: a full decode batch would not fit one step",
        ),
    )

    dtype: DType = Field(
        DType.AUTO,
        description="Data type of weights and activations. auto: float32 on CPU, else the checkpoint's. Default auto.",
    )
    quantization: Quantization | None = Field(
        None,
        description=(
            "fp8: weights of linear layers become 8-bit floats when they are loaded, activations before each GEMM. "
            "A checkpoint that is FP8 already needs nothing set. Default: as the checkpoint is."
        ),
    )
    max_model_len: int | None = Field(
        None,
        ge=2,
        le=1_048_576,
        description="Longest sequence, prompt and output together, in tokens. Default: the model's own limit.",
    )
    max_num_seqs: int = Field(
        16, ge=1, le=4096, description="Most sequences that run in one step. Default 16."
    )
    max_num_batched_tokens: int = Field(
        512, ge=1, le=65536, description="Most tokens that run in one step. Default 512."
    )
    block_size: int = Field(16, ge=1, le=256, description="Tokens per KV-cache block. Default 16.")
    kv_cache_memory: MemoryOrAuto = Field(
        AUTO_MEMORY,
        description=(
            "Memory for the KV cache, and for the states of state-space layers, as a quantity of bytes. auto: on a GPU what gpuMemoryUtilization leaves beside "
            "weights, activations and recorded graphs; 1Gi on a CPU. Default auto."
        ),
    )
    gpu_memory_utilization: float = Field(
        0.9,
        strict=True,
        gt=0,
        le=1,
        description=(
            "Part of the GPU's memory that may be in use once the KV cache is allocated, for kvCacheMemory auto. "
            "Default 0.9."
        ),
    )
    prefix_caching: bool = Field(
        True,
        description=(
            "Keep the keys and values of earlier requests while there is room, and compute only what a prompt does not "
            "share with them. Off for models with state-space layers. Default true."
        ),
    )
    max_queue_len: int = Field(
        256,
        ge=1,
        le=65536,
        description="Most requests that wait; beyond it the server answers 429. Default 256.",
    )
    enforce_eager: bool = Field(
        False,
        description="Run eagerly: level 0 and no graphs, whatever compilation says. Default false.",
    )

    @model_validator(mode="after")
    def _check_limits(self) -> EngineConfig:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"maxNumBatchedTokens {self.max_num_batched_tokens} is below maxNumSeqs "
                f"{self.max_num_seqs}: a full decode batch would not fit one step"
            )
        return self

    @property
    def kv_cache_bytes(self) -> int | None:
        """Memory for the KV cache in bytes; None if it is sized from what is free."""
        return None if self.kv_cache_memory == AUTO_MEMORY else parse_quantity(self.kv_cache_memory)
