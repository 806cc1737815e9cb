"""How many cache blocks fit, and the tensors that hold them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from kerf_runtime.config.engine import EngineConfig
from kerf_runtime.engine.state_cache import state_cache_bytes
from kerf_runtime.errors import ConfigError
from kerf_runtime.models.config import ModelConfig
from kerf_runtime.platforms.interface import DeviceMemory

__all__ = ["allocate_kv_cache", "bytes_per_block", "kv_cache_bytes", "plan_blocks"]

_CPU_BYTES = 2**30
"""What ``auto`` is on a CPU: its memory is shared with everything else, and cannot be had by asking."""


def bytes_per_block(config: ModelConfig, block_size: int, itemsize: int) -> int:
    """Bytes of one block in all layers that have attention: keys and values."""
    return 2 * config.num_attention_layers * block_size * config.kv_size * itemsize


def kv_cache_bytes(
    engine: EngineConfig, memory: DeviceMemory | None, *, activations: int, graphs: int
) -> int:
    """Memory for the KV cache and the states of requests: what was asked for, or what the device has left.

    What compiling and warming up had in use for a moment does not count: ``memory`` is taken afterwards.

    Args:
        engine: what was asked for.
        memory: of the device once the weights are there; None where it has none of its own.
        activations: bytes that the largest step needs.
        graphs: bytes that recorded graphs will take.

    Raises:
        ConfigError: it does not fit the device beside what else is needed.
    """
    requested = engine.kv_cache_bytes
    if memory is None:
        return _on_cpu(engine, requested)
    used = f"{_mib(memory.total - memory.free)} in use, {_mib(activations)} for activations, {_mib(graphs)} for graphs"
    if requested is None:
        left = int(memory.total * engine.gpu_memory_utilization) - (memory.total - memory.free)
        left -= activations + graphs
        if left <= 0:
            raise ConfigError(
                f"gpuMemoryUtilization {engine.gpu_memory_utilization} of {_mib(memory.total)} leaves nothing "
                f"for the KV cache: {used}",
                where="engine.gpuMemoryUtilization",
                hint="Raise it, lower engine.maxNumBatchedTokens, or record fewer graphs with "
                "compilation.captureSizes or graphMemoryBudget",
            )
        return left
    left = memory.free - activations - graphs
    if requested > left:
        raise ConfigError(
            f"{engine.kv_cache_memory} do not fit the device of {_mib(memory.total)}: {used}",
            where="engine.kvCacheMemory",
            hint=f"Set kvCacheMemory to auto, or to at most {_mib(max(0, left))}",
        )
    return requested


def _on_cpu(engine: EngineConfig, requested: int | None) -> int:
    """As asked for, as long as the machine has so much; pages that no block uses are never taken."""
    if requested is None:
        return _CPU_BYTES
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if requested > total:
        raise ConfigError(
            f"{engine.kv_cache_memory} do not fit the {_mib(total)} of memory of this machine",
            where="engine.kvCacheMemory",
            hint="Set kvCacheMemory to less, or to auto",
        )
    return requested


def _mib(size: int) -> str:
    return f"{size // 2**20}Mi"


def plan_blocks(
    config: ModelConfig, memory: int, engine: EngineConfig, *, max_model_len: int, itemsize: int
) -> int:
    """Number of cache blocks: what fits the memory; without prefix caching not more than can be in use.

    Args:
        config: of the model.
        memory: for all blocks, and for the states of requests if the model has any, in bytes.
        engine: block size, number of sequences, prefix caching.
        max_model_len: in tokens.
        itemsize: bytes of one cached number.

    Raises:
        ConfigError: not even one sequence of ``max_model_len`` tokens fits.
    """
    per_block = bytes_per_block(config, engine.block_size, itemsize)
    per_sequence = -(-max_model_len // engine.block_size)
    states = state_cache_bytes(config, engine.max_num_seqs, itemsize)
    affordable = max(0, memory - states) // per_block
    if affordable < per_sequence:
        needed = -(-(per_sequence * per_block + states) // 2**20)
        fitting = affordable * engine.block_size
        asked = engine.kv_cache_memory if engine.kv_cache_bytes is not None else _mib(memory)
        raise ConfigError(
            f"{asked} holds {fitting} tokens, but one sequence of maxModelLen "
            f"{max_model_len} needs {needed}Mi"
            + (f" with the states of maxNumSeqs {engine.max_num_seqs} requests" if states else ""),
            where="engine.kvCacheMemory",
            hint=f"Set kvCacheMemory to at least {needed}Mi"
            + (f", or maxModelLen to at most {fitting}" if fitting else "")
            + (", or lower maxNumSeqs" if states else ""),
        )
    if engine.prefix_caching:
        return affordable
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
