"""Which checkpoint tensors make which parameter of an OPT."""

from __future__ import annotations

from kerf_runtime.models.gpt.config import GptModelConfig
from kerf_runtime.models.gpt.weights import Row, finish, rules_of_table
from kerf_runtime.models.parameters import LoadedWeights
from kerf_runtime.models.sources import WeightSource

__all__ = ["finish", "plan"]

_TABLE = (
    Row("embedding", ("decoder.embed_tokens",)),
    Row("positions", ("decoder.embed_positions",)),
    Row("project_in", ("decoder.project_in",)),
    Row("layers.{i}.attention_norm", ("decoder.layers.{i}.self_attn_layer_norm",)),
    Row(
        "layers.{i}.attention.qkv_proj",
        (
            "decoder.layers.{i}.self_attn.q_proj",
            "decoder.layers.{i}.self_attn.k_proj",
            "decoder.layers.{i}.self_attn.v_proj",
        ),
    ),
    Row("layers.{i}.attention.o_proj", ("decoder.layers.{i}.self_attn.out_proj",)),
    Row("layers.{i}.mlp_norm", ("decoder.layers.{i}.final_layer_norm",)),
    Row("layers.{i}.mlp.up_proj", ("decoder.layers.{i}.fc1",)),
    Row("layers.{i}.mlp.down_proj", ("decoder.layers.{i}.fc2",)),
    Row("norm", ("decoder.final_layer_norm",)),
    Row("project_out", ("decoder.project_out",)),
    Row("lm_head", ("lm_head",)),
)


def plan(config: GptModelConfig, source: WeightSource) -> LoadedWeights:
    """The rules for one checkpoint."""
    return rules_of_table(_TABLE, config, source, base="model.")
