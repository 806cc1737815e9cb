"""Which checkpoint tensors make which parameter of the Bamba module.

``{i}`` is the layer.  Several names on the right are stacked along dim 0.  A linear layer or a norm brings its
weight and perhaps a bias; the parameters of the mixer that are no module of their own stand by their full names.
"""

from __future__ import annotations

from collections.abc import Iterator

from kerf_runtime.models.bamba.config import BambaModelConfig
from kerf_runtime.models.llama.weights import finish
from kerf_runtime.models.parameters import LoadedWeights, ParameterRule, tensors_of_module
from kerf_runtime.models.sources import WeightSource

__all__ = ["finish", "plan"]

_LAYER = "model.layers.{i}."
_GLOBAL: dict[str, tuple[str, ...]] = {
    "embedding": ("model.embed_tokens",),
    "norm": ("model.final_layernorm",),
    "lm_head": ("lm_head",),
}
_EVERY_LAYER: dict[str, tuple[str, ...]] = {
    "mlp_norm": ("pre_ff_layernorm",),
    "mlp.gate_up_proj": ("feed_forward.gate_proj", "feed_forward.up_proj"),
    "mlp.down_proj": ("feed_forward.down_proj",),
}
_ATTENTION_LAYER: dict[str, tuple[str, ...]] = {
    "attention_norm": ("input_layernorm",),
    "attention.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.o_proj": ("self_attn.o_proj",),
}
_MIXER_LAYER: dict[str, tuple[str, ...]] = {
    "mixer_norm": ("input_layernorm",),
    "mixer.in_proj": ("mamba.in_proj",),
    "mixer.norm": ("mamba.norm",),
    "mixer.out_proj": ("mamba.out_proj",),
}
_MIXER_TENSORS = {
    "mixer.conv_weight": "mamba.conv1d.weight",
    "mixer.conv_bias": "mamba.conv1d.bias",
    "mixer.dt_bias": "mamba.dt_bias",
    "mixer.a_log": "mamba.A_log",
    "mixer.d": "mamba.D",
}


def plan(config: BambaModelConfig, source: WeightSource) -> LoadedWeights:
    """The rules for one checkpoint; pure."""
    tied = frozenset({"lm_head.weight"} if config.tie_word_embeddings else ())
    return LoadedWeights(tuple(_rules(config)), tied)


def _rules(config: BambaModelConfig) -> Iterator[ParameterRule]:
    for ours, theirs in _GLOBAL.items():
        if not (ours == "lm_head" and config.tie_word_embeddings):
            yield from _module(config, ours, "", theirs, "")
    for index in range(config.num_layers):
        has_attention = index in config.attention_layers
        modules = _EVERY_LAYER | (_ATTENTION_LAYER if has_attention else _MIXER_LAYER)
        for ours, theirs in modules.items():
            yield from _module(config, ours, f"layers.{index}.", theirs, _LAYER.format(i=index))
        if not has_attention:
            yield from _tensors(config, index)


def _module(
    config: BambaModelConfig, ours: str, stem: str, theirs: tuple[str, ...], base: str
) -> Iterator[ParameterRule]:
    """The parameters of one linear layer or norm."""
    leaf = ours.rpartition(".")[2]
    rows = {
        "embedding": (config.vocab_size,),
        "lm_head": (config.vocab_size,),
        "qkv_proj": (config.q_size, config.kv_size, config.kv_size),
        "gate_up_proj": (config.intermediate_size, config.intermediate_size),
        "in_proj": (config.mixer_size + config.conv_channels + config.mixer_heads,),
    }
    if ours == "mixer.norm":
        rows["norm"] = (config.mixer_size,)
    biased = {
        "qkv_proj": config.attention_bias,
        "o_proj": config.attention_output_bias,
        "gate_up_proj": config.mlp_bias,
        "down_proj": config.mlp_bias,
        "in_proj": config.mixer_bias,
        "out_proj": config.mixer_bias,
    }
    scheme = config.quantization if leaf in biased else None
    for kind, how in tensors_of_module(scheme, bias=biased.get(leaf, False)):
        yield ParameterRule(
            parameter=f"{stem}{ours}.{kind}",
            sources=tuple(f"{base}{name}.{kind}" for name in theirs),
            rows=rows.get(leaf, (config.hidden_size,)),
            adapt=(None,) * len(theirs),
            how=how,
        )


def _tensors(config: BambaModelConfig, index: int) -> Iterator[ParameterRule]:
    """The parameters of a mixer that belong to no module inside it."""
    for ours, theirs in _MIXER_TENSORS.items():
        if ours == "mixer.conv_bias" and not config.conv_bias:
            continue
        convolves = ours.startswith("mixer.conv")
        yield ParameterRule(
            parameter=f"layers.{index}.{ours}",
            sources=(_LAYER.format(i=index) + theirs,),
            rows=(config.conv_channels if convolves else config.mixer_heads,),
            adapt=(None,),
        )
