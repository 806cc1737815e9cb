"""Reads the facts of an OPT checkpoint from ``config.json``.  Pure, no torch."""

from __future__ import annotations

from typing import Any

from kerf_runtime.models.facts import Facts
from kerf_runtime.models.gpt.config import GptModelConfig, activation_of, head_size
from kerf_runtime.models.quantization import scheme_from_json

__all__ = ["CLASSES", "config_from_json"]

CLASSES = ("OPTForCausalLM",)

_EPS = 1e-5
"""Of every norm; no file says so."""
_OFFSET = 2


def config_from_json(
    data: dict[str, Any], generation: dict[str, Any], where: str
) -> GptModelConfig:
    """Facts from the objects in ``config.json`` and ``generation_config.json`` (may be empty).

    Raises:
        ModelError: a value is missing, of the wrong kind, or stands for something unsupported.
    """
    facts = Facts(data, where)
    activation = activation_of(facts, "relu")
    facts.require("enable_bias", True, "linear layers without biases are not supported")
    facts.require("layer_norm_elementwise_affine", True, "norms without weights are not supported")
    facts.require(
        "_remove_final_layer_norm", False, "a model without its last norm is not supported"
    )
    heads = facts.integer("num_attention_heads")
    hidden = facts.integer("hidden_size")
    return GptModelConfig(
        architecture=CLASSES[0],
        num_layers=facts.integer("num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=facts.integer("ffn_dim"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_size(facts, "num_attention_heads", hidden, heads),
        vocab_size=facts.integer("vocab_size"),
        max_position_embeddings=facts.integer("max_position_embeddings", 2048),
        tie_word_embeddings=facts.flag("tie_word_embeddings", default=True),
        dtype=facts.dtype(),
        eos_token_ids=Facts(generation, where).tokens("eos_token_id")
        or facts.tokens("eos_token_id"),
        bos_token_id=next(iter(facts.tokens("bos_token_id")), None),
        quantization=scheme_from_json(data, where),
        layer_norm_eps=_EPS,
        activation=activation,
        position_offset=_OFFSET,
        norm_first=facts.flag("do_layer_norm_before", default=True),
        embedding_size=facts.integer("word_embed_proj_dim", hidden),
    )
