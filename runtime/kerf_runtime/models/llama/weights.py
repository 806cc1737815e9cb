"""Which checkpoint tensors make which parameter of the Llama module, in both file formats.

``{i}`` is the layer.  Several names on one side are stacked along dim 0: queries, keys and values, and
gate and up, become one projection each.  GGUF files of a Llama store the rows of query and key projections
with the two halves of each head interleaved (the layout of the original Llama code); they are put back
into halves here, so that one rotary embedding serves both formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kerf_runtime.layers.linear import Fp8Linear
from kerf_runtime.models.llama.config import GGUF_ROPE_FACTORS, LlamaModelConfig
from kerf_runtime.models.llama.model import Llama, inverse_frequencies
from kerf_runtime.models.llama.variants import VARIANTS
from kerf_runtime.models.parameters import LoadedWeights, ParameterRule, tensors_of_module
from kerf_runtime.models.sources import WeightSource

__all__ = ["finish", "halves_from_pairs", "plan"]


@dataclass(frozen=True)
class _Row:
    ours: str
    hugging_face: tuple[str, ...]
    gguf: tuple[str, ...]


_GLOBAL = (
    _Row("embedding", ("model.embed_tokens",), ("token_embd",)),
    _Row("norm", ("model.norm",), ("output_norm",)),
    _Row("lm_head", ("lm_head",), ("output",)),
)
_LAYER = (
    _Row(
        "layers.{i}.attention_norm", ("model.layers.{i}.input_layernorm",), ("blk.{i}.attn_norm",)
    ),
    _Row(
        "layers.{i}.attention.qkv_proj",
        (
            "model.layers.{i}.self_attn.q_proj",
            "model.layers.{i}.self_attn.k_proj",
            "model.layers.{i}.self_attn.v_proj",
        ),
        ("blk.{i}.attn_q", "blk.{i}.attn_k", "blk.{i}.attn_v"),
    ),
    _Row(
        "layers.{i}.attention.q_norm",
        ("model.layers.{i}.self_attn.q_norm",),
        ("blk.{i}.attn_q_norm",),
    ),
    _Row(
        "layers.{i}.attention.k_norm",
        ("model.layers.{i}.self_attn.k_norm",),
        ("blk.{i}.attn_k_norm",),
    ),
    _Row(
        "layers.{i}.attention.o_proj",
        ("model.layers.{i}.self_attn.o_proj",),
        ("blk.{i}.attn_output",),
    ),
    _Row(
        "layers.{i}.mlp_norm", ("model.layers.{i}.post_attention_layernorm",), ("blk.{i}.ffn_norm",)
    ),
    _Row(
        "layers.{i}.mlp.gate_up_proj",
        ("model.layers.{i}.mlp.gate_proj", "model.layers.{i}.mlp.up_proj"),
        ("blk.{i}.ffn_gate", "blk.{i}.ffn_up"),
    ),
    _Row("layers.{i}.mlp.down_proj", ("model.layers.{i}.mlp.down_proj",), ("blk.{i}.ffn_down",)),
)


def plan(config: LlamaModelConfig, source: WeightSource) -> LoadedWeights:
    """The rules for one checkpoint; pure apart from asking ``source`` for its names."""
    rows = {
        "embedding": (config.vocab_size,),
        "norm": (config.hidden_size,),
        "lm_head": (config.vocab_size,),
        "attention_norm": (config.hidden_size,),
        "qkv_proj": (config.q_size, config.kv_size, config.kv_size),
        "q_norm": (config.head_dim,),
        "k_norm": (config.head_dim,),
        "o_proj": (config.hidden_size,),
        "mlp_norm": (config.hidden_size,),
        "gate_up_proj": (config.intermediate_size, config.intermediate_size),
        "down_proj": (config.hidden_size,),
    }
    biased = {
        "qkv_proj": config.attention_bias,
        "o_proj": config.attention_output_bias,
        "gate_up_proj": config.mlp_bias,
        "down_proj": config.mlp_bias,
    }
    pairs: tuple[Callable[[Tensor], Tensor] | None, ...] = (
        partial(halves_from_pairs, heads=config.num_heads),
        partial(halves_from_pairs, heads=config.num_kv_heads),
        None,
    )

    stores_pairs = any(v.gguf_pairs for v in VARIANTS if v.architecture == config.architecture)
    absent = {"lm_head"} if config.tie_word_embeddings else set()
    absent |= set() if config.qk_norm else {"q_norm", "k_norm"}

    def rules() -> Iterator[ParameterRule]:
        for row, index in _rows(config):
            leaf = row.ours.rpartition(".")[2]
            if leaf in absent:
                continue
            names = row.gguf if source.is_gguf else row.hugging_face
            unpair = source.is_gguf and stores_pairs and leaf == "qkv_proj"
            scheme = config.quantization if leaf in biased else None
            for kind, how in tensors_of_module(scheme, bias=biased.get(leaf, False)):
                yield ParameterRule(
                    parameter=f"{row.ours}.{kind}".format(i=index),
                    sources=tuple(f"{name}.{kind}".format(i=index) for name in names),
                    rows=rows[leaf],
                    adapt=pairs if unpair else (None,) * len(names),
                    how=how,
                )

    return LoadedWeights(tuple(rules()), _ignored(config, source))


def _rows(config: LlamaModelConfig) -> Iterator[tuple[_Row, int]]:
    yield from ((row, 0) for row in _GLOBAL)
    yield from ((row, index) for index in range(config.num_layers) for row in _LAYER)


def _ignored(config: LlamaModelConfig, source: WeightSource) -> frozenset[str]:
    """Frequencies are computed; a tied head may be stored a second time."""
    frequencies = {name for name in source.names() if name.endswith("rotary_emb.inv_freq")}
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    return frozenset(frequencies | tied | {GGUF_ROPE_FACTORS})


def halves_from_pairs(tensor: Tensor, heads: int) -> Tensor:
    """Reorder rows from (pair, half) within each head to (half, pair): [heads * D, ...]."""
    split = tensor.view(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
    return split.transpose(1, 2).reshape(tensor.shape)


def finish(
    model: Llama,
    config: LlamaModelConfig,
    source: WeightSource,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
) -> None:
    """Tie the head and make what no checkpoint holds, once the parameters are there."""
    for module in model.modules():
        if isinstance(module, Fp8Linear):
            module.materialize(device)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.embedding.weight
    scaled = config.rope_scaling is not None and config.rope_scaling.kind == "factors"
    factors = source.read(GGUF_ROPE_FACTORS) if scaled else None
    model.rotary.fill(inverse_frequencies(config, factors), dtype=dtype, device=device)
