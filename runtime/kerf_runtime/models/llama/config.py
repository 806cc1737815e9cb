"""Reads the facts of a Llama checkpoint from ``config.json`` or GGUF metadata.  Pure, no torch.

What the model code would silently compute wrongly (another activation, partial rotary embedding, a
rope scaling we do not know) is refused here, by name.
"""

from __future__ import annotations

from typing import Any

from kerf_runtime.config.engine import DType
from kerf_runtime.errors import ModelError
from kerf_runtime.models.config import ModelConfig, RopeScaling
from kerf_runtime.models.gguf_file import GgufFile
from kerf_runtime.models.quantization import scheme_from_json

__all__ = ["CLASSES", "GGUF_NAMES", "config_from_gguf", "config_from_json"]

CLASSES = ("LlamaForCausalLM",)
GGUF_NAMES = ("llama",)
ROPE_SCALINGS = ("default", "linear", "llama3")
GGUF_ROPE_FACTORS = "rope_freqs.weight"

_DTYPES = {dtype.value: dtype for dtype in DType if dtype is not DType.AUTO}
_GGUF_DTYPES = {"F32": DType.FLOAT32, "F16": DType.FLOAT16}


class _Facts:
    """A mapping with typed access and errors that name the key."""

    def __init__(self, data: dict[str, Any], where: str) -> None:
        self.data, self.where = data, where

    def error(self, key: str, what: str, hint: str | None = None) -> ModelError:
        return ModelError(what, where=f"{self.where}: {key}", hint=hint)

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        value = self.data.get(key)
        value = default if value is None else value
        if value is None:
            raise self.error(key, "the value is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(key, f"expected an integer of at least {least}, found {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.data.get(key)
        value = default if value is None else value
        if value is None:
            raise self.error(key, "the value is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self.error(key, f"expected a number above 0, found {value!r}")
        return float(value)

    def tokens(self, key: str) -> tuple[int, ...]:
        value = self.data.get(key)
        values = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values):
            raise self.error(key, f"expected a token id or a list of them, found {value!r}")
        return tuple(values)


def config_from_json(data: dict[str, Any], generation: dict[str, Any], where: str) -> ModelConfig:
    """Facts from the objects in ``config.json`` and ``generation_config.json`` (may be empty).

    Raises:
        ModelError: a value is missing, of the wrong kind, or stands for something unsupported.
    """
    facts = _Facts(data, where)
    activation = data.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise facts.error(
            "hidden_act", f"activation {activation!r} is not supported", "Supported: silu"
        )
    heads = facts.integer("num_attention_heads")
    hidden = facts.integer("hidden_size")
    theta, scaling = _rope_from_json(facts)
    dtype = data.get("dtype") or data.get("torch_dtype") or "float32"
    if dtype not in _DTYPES:
        raise facts.error(
            "dtype", f"data type {dtype!r} is not supported", f"Supported: {', '.join(_DTYPES)}"
        )
    config = ModelConfig(
        architecture=CLASSES[0],
        num_layers=facts.integer("num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=facts.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=facts.integer("num_key_value_heads", heads),
        head_dim=facts.integer("head_dim", hidden // heads),
        vocab_size=facts.integer("vocab_size"),
        max_position_embeddings=facts.integer("max_position_embeddings", 2048),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=facts.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=bool(data.get("tie_word_embeddings", False)),
        attention_bias=bool(data.get("attention_bias", False)),
        mlp_bias=bool(data.get("mlp_bias", False)),
        dtype=_DTYPES[dtype],
        eos_token_ids=_Facts(generation, where).tokens("eos_token_id")
        or facts.tokens("eos_token_id"),
        bos_token_id=next(iter(facts.tokens("bos_token_id")), None),
        quantization=scheme_from_json(data, where),
    )
    return _checked(config, facts)


def config_from_gguf(header: GgufFile) -> ModelConfig:
    """Facts from GGUF metadata (keys ``llama.*``) and the list of tensors.

    Raises:
        ModelError: a value is missing, of the wrong kind, or stands for something unsupported.
    """
    facts = _Facts(header.metadata, str(header.path))
    heads = facts.integer("llama.attention.head_count")
    hidden = facts.integer("llama.embedding_length")
    head_dim = facts.integer("llama.attention.key_length", hidden // heads)
    rotary = facts.integer("llama.rope.dimension_count", head_dim)
    if rotary != head_dim or facts.integer("llama.attention.value_length", head_dim) != head_dim:
        raise facts.error(
            "llama.rope.dimension_count",
            f"only {rotary} of {head_dim} dimensions of a head are rotary (or values have another "
            "size), which is not supported",
        )
    if "llama.expert_count" in header.metadata:
        raise facts.error("llama.expert_count", "mixtures of experts are not supported")
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    embedding = header.tensors.get("token_embd.weight")
    known_vocab = len(tokens) if tokens else embedding.shape[0] if embedding else None
    kinds = {t.type_name for t in header.tensors.values() if len(t.shape) > 1}
    config = ModelConfig(
        architecture=CLASSES[0],
        num_layers=facts.integer("llama.block_count"),
        hidden_size=hidden,
        intermediate_size=facts.integer("llama.feed_forward_length"),
        num_heads=heads,
        num_kv_heads=facts.integer("llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab_size=facts.integer("llama.vocab_size", known_vocab),
        max_position_embeddings=facts.integer("llama.context_length"),
        rope_theta=_shortest(facts.number("llama.rope.freq_base", 10000.0)),
        rope_scaling=_rope_from_gguf(facts, header),
        rms_norm_eps=_shortest(facts.number("llama.attention.layer_norm_rms_epsilon")),
        tie_word_embeddings="output.weight" not in header.tensors,
        attention_bias="blk.0.attn_q.bias" in header.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in header.tensors,
        dtype=_GGUF_DTYPES.get(next(iter(kinds)), DType.BFLOAT16)
        if len(kinds) == 1
        else DType.BFLOAT16,
        eos_token_ids=tuple(
            dict.fromkeys(
                facts.tokens("tokenizer.ggml.eos_token_id")
                + facts.tokens("tokenizer.ggml.eot_token_id")
            )
        ),
        bos_token_id=next(iter(facts.tokens("tokenizer.ggml.bos_token_id")), None),
    )
    return _checked(config, facts)


def _checked(config: ModelConfig, facts: _Facts) -> ModelConfig:
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


def _rope_from_json(facts: _Facts) -> tuple[float, RopeScaling | None]:
    """Base and scaling from ``rope_theta`` and ``rope_scaling``, or ``rope_parameters`` (newer files)."""
    key = (
        "rope_parameters" if isinstance(facts.data.get("rope_parameters"), dict) else "rope_scaling"
    )
    data = facts.data.get(key) or {}
    rope = _Facts(data, f"{facts.where}: {key}")
    theta = rope.number("rope_theta", facts.number("rope_theta", 10000.0))
    if data.get("partial_rotary_factor", facts.data.get("partial_rotary_factor", 1.0)) != 1.0:
        raise facts.error("partial_rotary_factor", "partial rotary embedding is not supported")
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


def _rope_from_gguf(facts: _Facts, header: GgufFile) -> RopeScaling | None:
    kind = header.metadata.get("llama.rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise _unsupported_rope(facts, "llama.rope.scaling.type", str(kind))
    if kind == "linear":
        return RopeScaling("linear", factor=facts.number("llama.rope.scaling.factor"))
    return RopeScaling("factors") if GGUF_ROPE_FACTORS in header.tensors else None


def _unsupported_rope(facts: _Facts, key: str, kind: str) -> ModelError:
    return facts.error(
        key,
        f"rope scaling type {kind!r} is not supported",
        f"Supported: {', '.join(ROPE_SCALINGS)}",
    )


def _shortest(value: float) -> float:
    """The decimal number that was meant: GGUF stores 1e-05 as a 32-bit float."""
    return float(f"{value:.7g}")
