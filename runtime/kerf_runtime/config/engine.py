"""Engine limits: data type, lengths, batch sizes, memory."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from pydantic import Field, model_validator

from kerf_runtime.config.base import ConfigModel, Quantity, parse_quantity

__all__ = ["DType", "EngineConfig", "Quantization"]


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
        ge=1,
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
    kv_cache_memory: Quantity = Field(
        "1Gi", description="Memory for the KV cache, as a quantity of bytes. Default 1Gi."
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
    def kv_cache_bytes(self) -> int:
        """Memory for the KV cache in bytes."""
        return parse_quantity(self.kv_cache_memory)
