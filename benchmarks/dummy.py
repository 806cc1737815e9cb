"""Llama models of a given shape with random weights, for benchmarks: no checkpoint is needed."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from kerf_runtime.config.engine import DType
from kerf_runtime.models.dummy import fill_at_random
from kerf_runtime.models.llama import model as llama
from kerf_runtime.models.llama.config import LlamaModelConfig
from kerf_runtime.models.llama.model import inverse_frequencies

__all__ = ["LLAMA_8B", "NARROW_32", "build"]

LLAMA_8B = LlamaModelConfig(
    architecture="LlamaForCausalLM",
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    max_position_embeddings=8192,
    rope_theta=500000.0,
    rope_scaling=None,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    attention_bias=False,
    mlp_bias=False,
    dtype=DType.BFLOAT16,
    eos_token_ids=(2,),
    bos_token_id=1,
)
NARROW_32 = dataclasses.replace(
    LLAMA_8B,
    hidden_size=64,
    intermediate_size=128,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    vocab_size=256,
    max_position_embeddings=256,
)
"""The same number of layers and calls, with kernels that take no time."""


def build(
    config: LlamaModelConfig, *, device: torch.device, state: dict[str, nn.Parameter] | None = None
) -> nn.Module:
    """A model with small random weights in bfloat16 (float32 on the CPU), or with those of ``state``."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device("meta"):
        model = llama.build(config)
    if state is None:
        fill_at_random(model, dtype=dtype, device=device)
    else:
        for name, value in state.items():
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, value)
    model.rotary.fill(inverse_frequencies(config), dtype=dtype, device=device)
    return model.eval()
