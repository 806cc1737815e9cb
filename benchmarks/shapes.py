"""Shapes of the models that the targets name, as their ``config.json`` says it, and the workload of the targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["ANSWER", "CONFIGS", "PROMPT"]

PROMPT, ANSWER = 32, 128
"""Tokens of every prompt and of every answer."""

CONFIGS: Mapping[str, dict[str, Any]] = {
    "llama-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "opt-125m": {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "num_hidden_layers": 12,
        "hidden_size": 768,
        "word_embed_proj_dim": 768,
        "ffn_dim": 3072,
        "num_attention_heads": 12,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "do_layer_norm_before": True,
        "activation_function": "relu",
        "dtype": "float16",
        "bos_token_id": 2,
        "eos_token_id": 2,
        "pad_token_id": 1,
    },
    "tiny": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 320,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}
"""``tiny`` is no target: with it the programs themselves are tried on a CPU."""
