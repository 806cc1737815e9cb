"""Which checkpoint tensors make which parameter of a GPT-2.

In Hugging Face layout its matrices are stored [inputs, outputs], and in both queries, keys and values as one.
"""

from __future__ import annotations

from kerf_runtime.models.gpt.config import GptModelConfig
from kerf_runtime.models.gpt.weights import Row, finish, rules_of_table
from kerf_runtime.models.parameters import LoadedWeights
from kerf_runtime.models.sources import WeightSource

__all__ = ["finish", "plan"]

_TABLE = (
    Row("embedding", ("wte",), "token_embd"),
    Row("positions", ("wpe",), "position_embd"),
    Row("layers.{i}.attention_norm", ("h.{i}.ln_1",), "blk.{i}.attn_norm"),
    Row(
        "layers.{i}.attention.qkv_proj", ("h.{i}.attn.c_attn",), "blk.{i}.attn_qkv", transposed=True
    ),
    Row(
        "layers.{i}.attention.o_proj",
        ("h.{i}.attn.c_proj",),
        "blk.{i}.attn_output",
        transposed=True,
    ),
    Row("layers.{i}.mlp_norm", ("h.{i}.ln_2",), "blk.{i}.ffn_norm"),
    Row("layers.{i}.mlp.up_proj", ("h.{i}.mlp.c_fc",), "blk.{i}.ffn_up", transposed=True),
    Row("layers.{i}.mlp.down_proj", ("h.{i}.mlp.c_proj",), "blk.{i}.ffn_down", transposed=True),
    Row("norm", ("ln_f",), "output_norm"),
    Row("lm_head", ("lm_head",), "output"),
)
_MASKS = frozenset({"h.{i}.attn.bias", "h.{i}.attn.masked_bias"})
"""Causal masks that older files hold."""


def plan(config: GptModelConfig, source: WeightSource) -> LoadedWeights:
    """The rules for one checkpoint."""
    return rules_of_table(_TABLE, config, source, base="transformer.", ignored=_MASKS)
