"""Reads the facts of a Bamba checkpoint from ``config.json``.  Pure, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

from kerf_runtime.models.config import StateShape
from kerf_runtime.models.facts import Facts
from kerf_runtime.models.llama.config import LlamaModelConfig, rope_from_json
from kerf_runtime.models.quantization import scheme_from_json

__all__ = ["CLASSES", "BambaModelConfig", "config_from_json"]

CLASSES = ("BambaForCausalLM",)

_ROTATED = 0.5
"""The part of each head that is rotated, in every checkpoint."""


@dataclass(frozen=True, kw_only=True)
class BambaModelConfig(LlamaModelConfig):
    """A Llama some of whose layers have a state-space mixer in place of attention.

    Attributes:
        rotary_size: leading dimensions of a head that are rotated.
        attention_layers: indices of the layers with attention, ascending; the others have a mixer.
        mixer_heads: H of the mixer; letters as in ``ops.mamba_native``.
        mixer_head_dim: P.
        mixer_groups: G.
        mixer_columns: N.
        conv_width: W.
        conv_bias: of the convolution.
        mixer_bias: of the projections before and behind the mixer.
    """

    rotary_size: int
    attention_layers: tuple[int, ...]
    mixer_heads: int
    mixer_head_dim: int
    mixer_groups: int
    mixer_columns: int
    conv_width: int
    conv_bias: bool
    mixer_bias: bool

    @property
    def rotary_dim(self) -> int:
        return self.rotary_size

    @property
    def mixer_size(self) -> int:
        """Width of all heads of the mixer together, H * P."""
        return self.mixer_heads * self.mixer_head_dim

    @property
    def conv_channels(self) -> int:
        """C: what the convolution reads."""
        return self.mixer_size + 2 * self.mixer_groups * self.mixer_columns

    @property
    def num_attention_layers(self) -> int:
        return len(self.attention_layers)

    @property
    def state_shape(self) -> StateShape:
        return StateShape(
            layers=self.num_layers - self.num_attention_layers,
            taps=self.conv_width - 1,
            channels=self.conv_channels,
            heads=self.mixer_heads,
            head_dim=self.mixer_head_dim,
            columns=self.mixer_columns,
        )


def config_from_json(
    data: dict[str, Any], generation: dict[str, Any], where: str
) -> BambaModelConfig:
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
    _check_steps(facts)
    heads, hidden = facts.integer("num_attention_heads"), facts.integer("hidden_size")
    head_dim = facts.integer("head_dim", hidden // heads)
    theta, scaling = rope_from_json(facts, rotated=_ROTATED)
    attention = facts.flag("attention_bias", default=False)
    mixer_heads = facts.integer("mamba_n_heads", 128)
    config = BambaModelConfig(
        architecture=CLASSES[0],
        num_layers=facts.integer("num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=facts.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=facts.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        vocab_size=facts.integer("vocab_size"),
        max_position_embeddings=facts.integer("max_position_embeddings", 262144),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=facts.number("rms_norm_eps", 1e-5),
        tie_word_embeddings=facts.flag("tie_word_embeddings", default=False),
        attention_bias=attention,
        attention_output_bias=attention,
        mlp_bias=facts.flag("mlp_bias", default=False),
        dtype=facts.dtype(),
        eos_token_ids=Facts(generation, where).tokens("eos_token_id")
        or facts.tokens("eos_token_id"),
        bos_token_id=next(iter(facts.tokens("bos_token_id")), None),
        quantization=scheme_from_json(data, where),
        rotary_size=int(head_dim * _ROTATED),
        attention_layers=_attention_layers(facts),
        mixer_heads=mixer_heads,
        mixer_head_dim=_mixer_head_dim(facts, hidden, mixer_heads),
        mixer_groups=facts.integer("mamba_n_groups", 1),
        mixer_columns=facts.integer("mamba_d_state", 256),
        conv_width=facts.integer("mamba_d_conv", 4, least=2),
        conv_bias=facts.flag("mamba_conv_bias", default=True),
        mixer_bias=facts.flag("mamba_proj_bias", default=False),
    )
    return _checked(config, facts)


def _attention_layers(facts: Facts) -> tuple[int, ...]:
    """The layers with attention; there must be some of each kind."""
    layers, key = facts.integer("num_hidden_layers"), "attn_layer_indices"
    found = sorted(set(facts.tokens(key)))
    if found and found[-1] >= layers:
        raise facts.error(key, f"layer {found[-1]} is named, and there are {layers} from 0 on")
    if not 0 < len(found) < layers:
        raise facts.error(
            key,
            f"{len(found)} of {layers} layers have attention: no hybrid, which is not supported",
        )
    return tuple(found)


def _mixer_head_dim(facts: Facts, hidden: int, heads: int) -> int:
    """Given, or what the mixer's width leaves for each of its heads."""
    given = facts.data.get("mamba_d_head")
    width = facts.integer("mamba_expand", 2) * hidden
    if given in (None, "auto"):
        return width // heads
    size = facts.integer("mamba_d_head")
    if size * heads != width:
        raise facts.error(
            "mamba_d_head", f"{heads} heads of {size} do not make the width of the mixer, {width}"
        )
    return size


def _check_steps(facts: Facts) -> None:
    """Steps are never cut off; infinity has two spellings in JSON files."""
    key = "time_step_limit"
    limit = facts.data.get(key)
    if limit not in (None, [0.0, inf], [0.0, {"__float__": "Infinity"}]):
        raise facts.error(
            key, f"limits {limit!r} of a step are not supported", "Supported: 0 and infinity"
        )


def _checked(config: BambaModelConfig, facts: Facts) -> BambaModelConfig:
    for key, parts, whole in (
        ("num_key_value_heads", config.num_kv_heads, config.num_heads),
        ("mamba_n_groups", config.mixer_groups, config.mixer_heads),
    ):
        if whole % parts:
            raise facts.error(key, f"{whole} heads cannot share {parts} of them evenly")
    if config.rotary_size % 2:
        raise facts.error(
            "head_dim",
            f"{config.rotary_size} dimensions of a head are rotated, which is odd: they go in pairs",
        )
    return config
