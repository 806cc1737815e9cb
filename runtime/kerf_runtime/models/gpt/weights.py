"""From a table of names to the rules of one checkpoint, for the families that share ``models.gpt``.

Checkpoints made from the model without its head leave out the first part of every name (``base``); both
spellings are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kerf_runtime.layers.linear import Fp8Linear
from kerf_runtime.models.gpt.config import GptModelConfig
from kerf_runtime.models.gpt.model import Gpt
from kerf_runtime.models.parameters import LoadedWeights, ParameterRule, tensors_of_module
from kerf_runtime.models.sources import WeightSource

__all__ = ["Row", "finish", "rules_of_table"]

_PROJECTIONS = ("qkv_proj", "o_proj", "up_proj", "down_proj")
_NORMS = ("attention_norm", "mlp_norm", "norm")


@dataclass(frozen=True)
class Row:
    """One module of ours and the modules of the checkpoint that make it; ``{i}`` is the layer.

    Attributes:
        theirs: stacked along dim 0, without ``base``.
        gguf: the one module in GGUF files, which store every matrix [outputs, inputs].
        transposed: the matrix is stored [inputs, outputs].
    """

    ours: str
    theirs: tuple[str, ...]
    gguf: str = ""
    transposed: bool = False


def rules_of_table(
    table: Sequence[Row],
    config: GptModelConfig,
    source: WeightSource,
    *,
    base: str,
    ignored: frozenset[str] = frozenset(),
) -> LoadedWeights:
    """The rules for one checkpoint; pure apart from asking ``source`` for its names.

    Args:
        table: one row per module; those that this model does not have are passed over.
        base: first part of the names, with its dot.
        ignored: tensors that are rightly not used, by their names without ``base``.
    """
    present = source.names()
    prefix = base if any(name.startswith(base) for name in present) else ""
    rows_of = {
        "embedding": config.vocab_size,
        "positions": config.max_position_embeddings + config.position_offset,
        "project_out": config.embedding_size,
        "lm_head": config.vocab_size,
        "qkv_proj": 3 * config.q_size,
        "up_proj": config.intermediate_size,
    }
    absent = {"lm_head"} if config.tie_word_embeddings else set()
    absent |= set() if config.norm_first else {"norm"}
    absent |= (
        {"project_in", "project_out"} if config.embedding_size == config.hidden_size else set()
    )

    def rules() -> Iterator[ParameterRule]:
        for row, index in _rows(table, config.num_layers):
            leaf = row.ours.rpartition(".")[2]
            if leaf in absent:
                continue
            stem = "" if leaf == "lm_head" else prefix
            theirs = (row.gguf,) if source.is_gguf else tuple(stem + n for n in row.theirs)
            names = [name.format(i=index) for name in theirs]
            scheme = config.quantization if leaf in _PROJECTIONS else None
            for kind, how in tensors_of_module(scheme, bias=leaf in (*_PROJECTIONS, *_NORMS)):
                yield ParameterRule(
                    parameter=f"{row.ours}.{kind}".format(i=index),
                    sources=tuple(f"{name}.{kind}" for name in names),
                    rows=(rows_of.get(leaf, config.hidden_size) // len(names),) * len(names),
                    adapt=(None,) * len(names),
                    how=how,
                    transposed=row.transposed and kind == "weight" and not source.is_gguf,
                )

    unused = {f"{prefix}{name}".format(i=i) for name in ignored for i in range(config.num_layers)}
    return LoadedWeights(tuple(rules()), frozenset(unused | {"lm_head.weight"}))


def _rows(table: Sequence[Row], layers: int) -> Iterator[tuple[Row, int]]:
    for row in table:
        yield from ((row, index) for index in range(layers if "{i}" in row.ours else 1))


def finish(
    model: Gpt,
    config: GptModelConfig,
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
