"""Reads the facts of a GPT-2 checkpoint from ``config.json``.  Pure, no torch."""

from __future__ import annotations

from typing import Any

from kerf_runtime.models.facts import Facts
from kerf_runtime.models.gpt.config import GptModelConfig, activation_of, head_size

__all__ = ["CLASSES", "config_from_json"]

CLASSES = ("GPT2LMHeadModel",)


def config_from_json(
    data: dict[str, Any], generation: dict[str, Any], where: str
) -> GptModelConfig:
    """Facts from the objects in ``config.json`` and ``generation_config.json`` (may be empty).

    Raises:
        ModelError: a value is missing, of the wrong kind, or stands for something unsupported.
    """
    facts = Facts(data, where)
    activation = activation_of(facts, "gelu_new")
    facts.require("scale_attn_weights", True, "attention that is not scaled is not supported")
    facts.require(
        "scale_attn_by_inverse_layer_idx", False, "attention scaled by layer is not supported"
    )
    facts.require("add_cross_attention", False, "cross-attention is not supported")
    if data.get("quantization_config"):
        raise facts.error(
            "quantization_config",
            "quantised checkpoints of this architecture are not supported",
            "Use the unquantised checkpoint, perhaps with engine.quantization: fp8",
        )
    heads = facts.integer("n_head")
    hidden = facts.integer("n_embd")
    return GptModelConfig(
        architecture=CLASSES[0],
        num_layers=facts.integer("n_layer"),
        hidden_size=hidden,
        intermediate_size=facts.integer("n_inner", 4 * hidden),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_size(facts, "n_head", hidden, heads),
        vocab_size=facts.integer("vocab_size"),
        max_position_embeddings=facts.integer("n_positions", 1024),
        tie_word_embeddings=facts.flag("tie_word_embeddings", default=True),
        dtype=facts.dtype(),
        eos_token_ids=Facts(generation, where).tokens("eos_token_id")
        or facts.tokens("eos_token_id"),
        bos_token_id=next(iter(facts.tokens("bos_token_id")), None),
        layer_norm_eps=facts.number("layer_norm_epsilon", 1e-5),
        activation=activation,
        embedding_size=hidden,
    )
