"""How many cache blocks are planned, and what is said when too few fit."""

from __future__ import annotations

import pytest
import torch

from kerf_runtime.config.engine import DType, EngineConfig
from kerf_runtime.engine.kv_cache import allocate_kv_cache, bytes_per_block, plan_blocks
from kerf_runtime.errors import ConfigError
from kerf_runtime.models.llama.config import LlamaModelConfig

CONFIG = LlamaModelConfig(
    architecture="LlamaForCausalLM",
    num_layers=2,
    hidden_size=64,
    intermediate_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=100,
    max_position_embeddings=256,
    rope_theta=10000.0,
    rope_scaling=None,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    attention_bias=False,
    mlp_bias=False,
    dtype=DType.FLOAT32,
    eos_token_ids=(),
    bos_token_id=None,
)


def engine(memory: str, *, seqs: int = 4) -> EngineConfig:
    return EngineConfig(kv_cache_memory=memory, max_num_seqs=seqs, block_size=16)  # type: ignore[call-arg]


def test_a_block_holds_keys_and_values_of_every_layer() -> None:
    assert bytes_per_block(CONFIG, 16, 4) == 2 * 2 * 16 * (2 * 16) * 4


def test_blocks_fill_the_memory() -> None:
    blocks = plan_blocks(CONFIG, engine("400Ki"), max_model_len=256, itemsize=4)
    assert blocks == 400 * 1024 // bytes_per_block(CONFIG, 16, 4) == 50


def test_no_more_blocks_than_can_be_used() -> None:
    assert plan_blocks(CONFIG, engine("1Gi", seqs=3), max_model_len=100, itemsize=4) == 3 * 7


def test_memory_for_less_than_one_sequence_is_refused_with_the_amount_that_is_needed() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_blocks(CONFIG, engine("100Ki"), max_model_len=2560, itemsize=4)
    assert caught.value.where == "engine.kvCacheMemory"
    assert "maxModelLen 2560 needs 2Mi" in str(caught.value)
    assert "or maxModelLen to at most 192" in str(caught.value)


def test_the_cache_starts_as_zeros_of_the_right_shape() -> None:
    caches = allocate_kv_cache(
        ("a", "b"),
        CONFIG,
        num_blocks=5,
        block_size=16,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    assert list(caches) == ["a", "b"]
    for tensor in (*caches["a"], *caches["b"]):
        assert tensor.shape == (5, 16, 2, 16)
        assert tensor.dtype is torch.bfloat16
        assert torch.count_nonzero(tensor) == 0
