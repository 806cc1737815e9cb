"""How many cache blocks fit, and the tensors that hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from kerf_runtime.config.engine import EngineConfig
from kerf_runtime.errors import ConfigError
from kerf_runtime.models.config import ModelConfig

__all__ = ["allocate_kv_cache", "bytes_per_block", "plan_blocks"]


def bytes_per_block(config: ModelConfig, block_size: int, itemsize: int) -> int:
    """Bytes of one block in all layers: keys and values."""
    return 2 * config.num_layers * block_size * config.kv_size * itemsize


def plan_blocks(
    config: ModelConfig, engine: EngineConfig, *, max_model_len: int, itemsize: int
) -> int:
    """Number of cache blocks: what fits the memory, and never more than could be used.

    Args:
        config: of the model.
        engine: block size, memory, number of sequences.
        max_model_len: in tokens.
        itemsize: bytes of one cached number.

    Raises:
        ConfigError: not even one sequence of ``max_model_len`` tokens fits.
    """
    per_block = bytes_per_block(config, engine.block_size, itemsize)
    per_sequence = -(-max_model_len // engine.block_size)
    affordable = engine.kv_cache_bytes // per_block
    if affordable < per_sequence:
        needed = -(-per_sequence * per_block // 2**20)
        fitting = affordable * engine.block_size
        raise ConfigError(
            f"{engine.kv_cache_memory} holds {fitting} tokens, but one sequence of maxModelLen "
            f"{max_model_len} needs {needed}Mi",
            where="engine.kvCacheMemory",
            hint=f"Set kvCacheMemory to at least {needed}Mi"
            + (f", or maxModelLen to at most {fitting}" if fitting else ""),
        )
    return min(affordable, engine.max_num_seqs * per_sequence)


def allocate_kv_cache(
    layers: Sequence[str],
    config: ModelConfig,
    *,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Mapping[str, tuple[Tensor, Tensor]]:
    """Key and value cache of each attention layer, [N, S, K, D] each, zeroed.

    Zeroed because masked-out positions are still multiplied by zero weights, and zero times garbage
    may be NaN.
    """
    shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)

    def zeros() -> Tensor:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        # From the operating system's zero pages: blocks that are never used cost no memory, and
        # start-up does not wait for a gigabyte to be cleared as with torch.zeros.
        raw = np.zeros(prod(shape) * dtype.itemsize, dtype=np.uint8)
        return torch.from_numpy(raw).view(dtype).view(shape)

    return {layer: (zeros(), zeros()) for layer in layers}
