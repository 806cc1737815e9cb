"""How many cache blocks are planned, and what is said when too few fit."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

from kerf_runtime.config.engine import DType, EngineConfig
from kerf_runtime.engine.kv_cache import (
    allocate_kv_cache,
    bytes_per_block,
    kv_cache_bytes,
    plan_blocks,
)
from kerf_runtime.engine.state_cache import allocate_states, state_cache_bytes
from kerf_runtime.errors import ConfigError
from kerf_runtime.models.bamba.config import BambaModelConfig
from kerf_runtime.models.llama.config import LlamaModelConfig
from kerf_runtime.platforms import DeviceMemory

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


def planned(config: EngineConfig, *, max_model_len: int) -> int:
    memory = kv_cache_bytes(config, None, activations=0, graphs=0)
    return plan_blocks(CONFIG, memory, config, max_model_len=max_model_len, itemsize=4)


def test_blocks_fill_the_memory() -> None:
    blocks = planned(engine("400Ki"), max_model_len=256)
    assert blocks == 400 * 1024 // bytes_per_block(CONFIG, 16, 4) == 50


def test_what_running_requests_cannot_use_holds_what_earlier_ones_computed() -> None:
    config = engine("1Gi", seqs=3)
    assert planned(config, max_model_len=100) == 2**30 // bytes_per_block(CONFIG, 16, 4)
    without = config.model_copy(update={"prefix_caching": False})
    assert planned(without, max_model_len=100) == 3 * 7


def test_memory_for_less_than_one_sequence_is_refused_with_the_amount_that_is_needed() -> None:
    with pytest.raises(ConfigError) as caught:
        planned(engine("100Ki"), max_model_len=2560)
    assert caught.value.where == "engine.kvCacheMemory"
    assert "maxModelLen 2560 needs 2Mi" in str(caught.value)
    assert "or maxModelLen to at most 192" in str(caught.value)


HYBRID = BambaModelConfig(
    **{f.name: getattr(CONFIG, f.name) for f in fields(CONFIG) if f.name != "architecture"},
    architecture="BambaForCausalLM",
    rotary_size=8,
    attention_layers=(1,),
    mixer_heads=8,
    mixer_head_dim=16,
    mixer_groups=1,
    mixer_columns=32,
    conv_width=4,
    conv_bias=True,
    mixer_bias=False,
)


def test_layers_without_attention_have_no_part_in_a_block() -> None:
    assert bytes_per_block(HYBRID, 16, 4) == bytes_per_block(CONFIG, 16, 4) // 2


def test_the_states_of_all_requests_and_of_padding_are_set_aside_first() -> None:
    config = engine("400Ki", seqs=4)
    states = 5 * (3 * (128 + 2 * 32) * 4 + 8 * 16 * 32 * 4)
    assert state_cache_bytes(HYBRID, 4, 4) == states
    assert state_cache_bytes(CONFIG, 4, 4) == 0
    blocks = plan_blocks(HYBRID, 400 * 1024, config, max_model_len=256, itemsize=4)
    assert blocks == (400 * 1024 - states) // bytes_per_block(HYBRID, 16, 4) > 16
    with pytest.raises(ConfigError, match="with the states of maxNumSeqs 4 requests"):
        plan_blocks(HYBRID, states, config, max_model_len=256, itemsize=4)


def test_states_have_one_tensor_for_inputs_and_one_in_float32_per_layer() -> None:
    options: dict[str, Any] = {"slots": 5, "dtype": torch.bfloat16, "device": torch.device("cpu")}
    found = allocate_states(["a"], HYBRID, **options)
    inputs, state = found["a"]
    assert (inputs.shape, inputs.dtype) == ((5, 3, 192), torch.bfloat16)
    assert (state.shape, state.dtype) == ((5, 8, 16, 32), torch.float32)
    assert sum(t.nbytes for t in found["a"]) == state_cache_bytes(HYBRID, 4, 2)
    assert allocate_states([], CONFIG, **options) == {}


GIB = 2**30
DEVICE = DeviceMemory(total=100 * GIB, free=70 * GIB, reserved=0)


def test_auto_on_a_device_is_what_weights_activations_and_graphs_leave_of_the_part_in_use() -> None:
    auto = engine("auto")
    assert auto.kv_cache_bytes is None
    size = kv_cache_bytes(auto, DEVICE, activations=2 * GIB, graphs=GIB)
    assert size == (90 - 30 - 2 - 1) * GIB
    half = auto.model_copy(update={"gpu_memory_utilization": 0.5})
    assert kv_cache_bytes(half, DEVICE, activations=0, graphs=0) == 20 * GIB


def test_auto_without_device_memory_is_a_gibibyte() -> None:
    assert kv_cache_bytes(engine("auto"), None, activations=0, graphs=0) == GIB


def test_more_than_the_machine_has_is_refused_on_a_cpu_too() -> None:
    with pytest.raises(ConfigError, match=r"9999Ti do not fit the \d+Mi of memory of this machine"):
        kv_cache_bytes(engine("9999Ti"), None, activations=0, graphs=0)


def test_auto_with_nothing_left_says_where_the_memory_is() -> None:
    with pytest.raises(ConfigError) as caught:
        kv_cache_bytes(engine("auto"), DEVICE, activations=50 * GIB, graphs=10 * GIB)
    assert caught.value.where == "engine.gpuMemoryUtilization"
    assert "30720Mi in use, 51200Mi for activations, 10240Mi for graphs" in str(caught.value)


def test_a_quantity_is_taken_as_it_is_and_refused_where_it_does_not_fit() -> None:
    assert kv_cache_bytes(engine("65Gi"), DEVICE, activations=GIB, graphs=GIB) == 65 * GIB
    with pytest.raises(ConfigError, match="69Gi do not fit the device of 102400Mi") as caught:
        kv_cache_bytes(engine("69Gi"), DEVICE, activations=GIB, graphs=GIB)
    assert caught.value.where == "engine.kvCacheMemory"
    assert caught.value.hint == "Set kvCacheMemory to auto, or to at most 69632Mi"


def test_too_little_left_for_one_sequence_names_what_is_left() -> None:
    with pytest.raises(ConfigError, match="1Mi holds"):
        plan_blocks(CONFIG, 2**20, engine("auto"), max_model_len=25600, itemsize=4)


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
