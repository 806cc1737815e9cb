"""A tiny random checkpoint of every family, and prompts for them: the same for a CPU and for a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tests.models.checkpoints import make_bamba, make_llama
from tests.models.test_gpt import make_gpt2, make_opt
from tests.models.test_llama_variants import make_mistral, make_qwen2, make_qwen3

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

FAMILIES: dict[str, Callable[..., Any]] = {
    "Llama 2": make_llama,
    "Llama 3": partial(make_llama, rope_parameters=LLAMA3),
    "Mistral": partial(make_mistral, sliding_window=24),
    "Qwen2": make_qwen2,
    "Qwen3": make_qwen3,
    "OPT": make_opt,
    "GPT-2": make_gpt2,
    "Bamba": make_bamba,
}
"""By name, what makes one; called with keyword arguments, those of its configuration are changed."""

_HEADS = {"hidden_size": 256, "num_attention_heads": 4}
_GROUPED_HEADS = {**_HEADS, "num_key_value_heads": 2}

GPU_OPTIONS: dict[str, dict[str, Any]] = {
    "Llama 2": _GROUPED_HEADS,
    "Llama 3": _GROUPED_HEADS,
    # With this window no two tokens are nearly as likely where an answer to ``PROMPTS`` chooses.
    "Mistral": {**_GROUPED_HEADS, "sliding_window": 28},
    "Qwen2": _GROUPED_HEADS,
    "Qwen3": {**_GROUPED_HEADS, "head_dim": 64},
    "OPT": _HEADS,
    "GPT-2": {"n_embd": 256, "n_head": 4},
    # transformers 5.17 normalises behind a mixer over all groups together; with one group that is the same.
    "Bamba": {**_GROUPED_HEADS, "mamba_n_heads": 4, "mamba_n_groups": 1},
}
"""By name, what is changed for a GPU: heads of 64 numbers, the least that its kernels promise to serve."""

TEXT = [(7 * i * i + 3) % 320 for i in range(90)]
PROMPTS = [TEXT[:70], TEXT[:40], [*TEXT[:33], 9, 9], TEXT[1:60], TEXT[:70], [5]]
"""Some begin alike, in more than a block."""
