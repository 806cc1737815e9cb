"""Reads the facts of a Llama, or of a variant of it, from ``config.json`` or GGUF metadata.  Pure, no torch.

What the model code would silently compute wrongly (another activation, partial rotary embedding, a
rope scaling we do not know) is refused here, by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kerf_runtime.errors import ModelError
from kerf_runtime.models.config import ModelConfig, RopeScaling
from kerf_runtime.models.facts import Facts
from kerf_runtime.models.gguf_facts import (
    ending_tokens,
    shortest,
    stored_dtype,
    vocabulary_size,
)
from kerf_runtime.models.gguf_file import GgufFile
from kerf_runtime.models.llama.variants import Variant
from kerf_runtime.models.quantization import scheme_from_json

__all__ = ["LlamaModelConfig", "config_from_gguf", "config_from_json", "rope_from_json"]

ROPE_SCALINGS = ("default", "linear", "llama3")
GGUF_ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, kw_only=True)
class LlamaModelConfig(ModelConfig):
    """A Llama, or a variant of it.

    Attributes:
        rope_theta: base of the rotary frequencies.
        attention_bias: of the query, key and value projections.
        attention_output_bias: of the projection behind attention.
        qk_norm: queries and keys are normalised per head before they are rotated.
    """

    rope_theta: float
    rope_scaling: RopeScaling | None
    rms_norm_eps: float
    attention_bias: bool
    attention_output_bias: bool = False
    mlp_bias: bool
    qk_norm: bool = False

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of a head that are rotated."""
        return self.head_dim


def config_from_json(
    variant: Variant, data: dict[str, Any], generation: dict[str, Any], where: str
) -> LlamaModelConfig:
    """Facts from the objects in ``config.json`` and ``generation_config.json`` (may be empty).

    Raises:
        ModelError: a value is missing, of the wrong kind, or stands for something unsupported.
    """
    facts = Facts(data, where)
    activation = data.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise facts.error(
            "hidden_act", f"activation {activation!r} is not supported", "Supported: silu"
        )
    heads = facts.integer("num_attention_heads")
    hidden = facts.integer("hidden_size")
    theta, scaling = rope_from_json(facts)
    window, full_layers = variant.window(facts)
    attention = facts.flag("attention_bias", default=False)
    biases = variant.biases or (attention, attention, facts.flag("mlp_bias", default=False))
    config = LlamaModelConfig(
        architecture=variant.architecture,
        num_layers=facts.integer("num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=facts.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=facts.integer("num_key_value_heads", heads),
        head_dim=facts.integer("head_dim", variant.head_dim or hidden // heads),
        vocab_size=facts.integer("vocab_size"),
        max_position_embeddings=facts.integer("max_position_embeddings", variant.max_positions),
        sliding_window=window,
        full_layers=full_layers,
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=facts.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=facts.flag("tie_word_embeddings", default=False),
        attention_bias=biases[0],
        attention_output_bias=biases[1],
        mlp_bias=biases[2],
        qk_norm=variant.qk_norm,
        dtype=facts.dtype(),
        eos_token_ids=Facts(generation, where).tokens("eos_token_id")
        or facts.tokens("eos_token_id"),
        bos_token_id=next(iter(facts.tokens("bos_token_id")), None),
        quantization=scheme_from_json(data, where),
    )
    return _checked(config, facts)


def config_from_gguf(variant: Variant, header: GgufFile) -> LlamaModelConfig:
    """Facts from GGUF metadata (keys such as ``llama.block_count``) and the list of tensors.

    Raises:
        ModelError: a value is missing, of the wrong kind, or stands for something unsupported.
    """
    facts = Facts(header.metadata, str(header.path))
    name = variant.gguf_name
    heads = facts.integer(f"{name}.attention.head_count")
    hidden = facts.integer(f"{name}.embedding_length")
    head_dim = facts.integer(f"{name}.attention.key_length", hidden // heads)
    rotary = facts.integer(f"{name}.rope.dimension_count", head_dim)
    if rotary != head_dim or facts.integer(f"{name}.attention.value_length", head_dim) != head_dim:
        raise facts.error(
            f"{name}.rope.dimension_count",
            f"only {rotary} of {head_dim} dimensions of a head are rotary (or values have another "
            "size), which is not supported",
        )
    if f"{name}.expert_count" in header.metadata:
        raise facts.error(f"{name}.expert_count", "mixtures of experts are not supported")
    windowed = f"{name}.attention.sliding_window" in header.metadata
    config = LlamaModelConfig(
        architecture=variant.architecture,
        num_layers=facts.integer(f"{name}.block_count"),
        hidden_size=hidden,
        intermediate_size=facts.integer(f"{name}.feed_forward_length"),
        num_heads=heads,
        num_kv_heads=facts.integer(f"{name}.attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab_size=facts.integer(f"{name}.vocab_size", vocabulary_size(header)),
        max_position_embeddings=facts.integer(f"{name}.context_length"),
        sliding_window=facts.integer(f"{name}.attention.sliding_window") if windowed else None,
        rope_theta=shortest(facts.number(f"{name}.rope.freq_base", 10000.0)),
        rope_scaling=_rope_from_gguf(facts, header, f"{name}.rope.scaling"),
        rms_norm_eps=shortest(facts.number(f"{name}.attention.layer_norm_rms_epsilon")),
        tie_word_embeddings="output.weight" not in header.tensors,
        attention_bias="blk.0.attn_q.bias" in header.tensors,
        attention_output_bias="blk.0.attn_output.bias" in header.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in header.tensors,
        qk_norm=variant.qk_norm,
        dtype=stored_dtype(header),
        eos_token_ids=ending_tokens(facts),
        bos_token_id=next(iter(facts.tokens("tokenizer.ggml.bos_token_id")), None),
    )
    return _checked(config, facts)


def _checked(config: LlamaModelConfig, facts: Facts) -> LlamaModelConfig:
    if config.num_heads % config.num_kv_heads:
        raise facts.error(
            "num_key_value_heads",
            f"{config.num_heads} query heads cannot share {config.num_kv_heads} key/value heads evenly",
        )
    if config.head_dim % 2:
        raise facts.error(
            "head_dim", f"head size {config.head_dim} is odd; rotary embedding needs pairs"
        )
    return config


def rope_from_json(facts: Facts, *, rotated: float = 1.0) -> tuple[float, RopeScaling | None]:
    """Base and scaling from ``rope_theta`` and ``rope_scaling``, or ``rope_parameters`` (newer files).

    Args:
        facts: of the file.
        rotated: the part of a head that the family rotates.

    Raises:
        ModelError: another part of a head is rotated, or the scaling is not supported.
    """
    key = (
        "rope_parameters" if isinstance(facts.data.get("rope_parameters"), dict) else "rope_scaling"
    )
    data = facts.data.get(key) or {}
    rope = Facts(data, f"{facts.where}: {key}")
    theta = rope.number("rope_theta", facts.number("rope_theta", 10000.0))
    part = data.get("partial_rotary_factor", facts.data.get("partial_rotary_factor", rotated))
    if part != rotated:
        raise facts.error(
            "partial_rotary_factor",
            f"partial rotary embedding is not supported: {part!r} of each head, not {rotated}",
        )
    kind = data.get("rope_type", data.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", factor=rope.number("factor"))
    if kind == "llama3":
        return theta, RopeScaling(
            "llama3",
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_position=rope.integer("original_max_position_embeddings"),
        )
    raise _unsupported_rope(facts, key, str(kind))


def _rope_from_gguf(facts: Facts, header: GgufFile, key: str) -> RopeScaling | None:
    kind = header.metadata.get(f"{key}.type", "none")
    if kind not in ("none", "linear"):
        raise _unsupported_rope(facts, f"{key}.type", str(kind))
    if kind == "linear":
        return RopeScaling("linear", factor=facts.number(f"{key}.factor"))
    return RopeScaling("factors") if GGUF_ROPE_FACTORS in header.tensors else None


def _unsupported_rope(facts: Facts, key: str, kind: str) -> ModelError:
    return facts.error(
        key,
        f"rope scaling type {kind!r} is not supported",
        f"Supported: {', '.join(ROPE_SCALINGS)}",
    )
