"""Reads the facts of a GPT-2 checkpoint from ``config.json`` or GGUF metadata.  Pure, no torch."""

from __future__ import annotations

from typing import Any

from kerf_runtime.models.facts import Facts
from kerf_runtime.models.gguf_facts import (
    ending_tokens,
    shortest,
    stored_dtype,
    vocabulary_size,
)
from kerf_runtime.models.gguf_file import GgufFile
from kerf_runtime.models.gpt.config import GptModelConfig, activation_of, head_size

__all__ = ["CLASSES", "GGUF_NAME", "config_from_gguf", "config_from_json"]

CLASSES = ("GPT2LMHeadModel",)
GGUF_NAME = "gpt2"


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


def config_from_gguf(header: GgufFile) -> GptModelConfig:
    """Facts from GGUF metadata (keys ``gpt2.*``) and the list of tensors.

    Raises:
        ModelError: a value is missing or of the wrong kind.
    """
    facts = Facts(header.metadata, str(header.path))
    heads = facts.integer("gpt2.attention.head_count")
    hidden = facts.integer("gpt2.embedding_length")
    return GptModelConfig(
        architecture=CLASSES[0],
        num_layers=facts.integer("gpt2.block_count"),
        hidden_size=hidden,
        intermediate_size=facts.integer("gpt2.feed_forward_length"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_size(facts, "gpt2.attention.head_count", hidden, heads),
        vocab_size=facts.integer("gpt2.vocab_size", vocabulary_size(header)),
        max_position_embeddings=facts.integer("gpt2.context_length"),
        tie_word_embeddings="output.weight" not in header.tensors,
        dtype=stored_dtype(header),
        eos_token_ids=ending_tokens(facts),
        bos_token_id=next(iter(facts.tokens("tokenizer.ggml.bos_token_id")), None),
        layer_norm_eps=shortest(facts.number("gpt2.attention.layer_norm_epsilon")),
        activation="gelu_tanh",
        embedding_size=hidden,
    )
