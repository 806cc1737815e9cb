"""Builds a model and fills it with the weights of a checkpoint.

The module is made on the meta device (no memory), then every parameter is allocated once, at its final
size and data type on its final device, and the parts of fused parameters are copied into their rows.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from kerf_runtime.config.engine import DType
from kerf_runtime.errors import ModelError
from kerf_runtime.models.checkpoint import find_checkpoint
from kerf_runtime.models.config import ModelConfig
from kerf_runtime.models.describe import read_model_config
from kerf_runtime.models.registry import family_of
from kerf_runtime.models.sources import WeightSource, open_source

__all__ = ["LoadedModel", "LoadedWeights", "ParameterRule", "fill", "load_model", "torch_dtype"]

Progress = Callable[[str, float | None], None]
"""Called with a detail for people and the fraction done (0..1), or None if unknown."""


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run eagerly, and the facts it was built from.

    ``attention_layers`` are the names by which the attention operator finds its KV cache.
    """

    model: nn.Module
    config: ModelConfig
    attention_layers: tuple[str, ...]


@dataclass(frozen=True)
class ParameterRule:
    """Where one parameter of our module comes from.

    Attributes:
        parameter: our name.
        sources: checkpoint tensors that are stacked along dim 0, in order.
        rows: rows of each source.
        adapt: what to do to each source before it is copied (None: nothing).
    """

    parameter: str
    sources: tuple[str, ...]
    rows: tuple[int, ...]
    adapt: tuple[Callable[[Tensor], Tensor] | None, ...]


@dataclass(frozen=True)
class LoadedWeights:
    """What a family's ``weights`` module says about one checkpoint.

    Attributes:
        rules: one per parameter.
        ignored: checkpoint tensors that are rightly not used.
    """

    rules: Sequence[ParameterRule]
    ignored: frozenset[str]


def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch name of a concrete data type."""
    names: Mapping[DType, torch.dtype] = {
        DType.FLOAT32: torch.float32,
        DType.BFLOAT16: torch.bfloat16,
        DType.FLOAT16: torch.float16,
    }
    return names[dtype]


def load_model(
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None = None,
) -> LoadedModel:
    """Build the model of a checkpoint and load its weights.

    Args:
        path: folder or GGUF file.
        dtype: of weights and activations.
        device: where the parameters go.
        progress: told how far the weights are.

    Raises:
        ModelError: no such checkpoint, unsupported, or weights that are missing, of the wrong shape,
            damaged or unknown to the architecture.
    """
    path = Path(path)
    config = read_model_config(path)
    package = family_of(config).package
    model_code = importlib.import_module(f"{package}.model")
    weights_code = importlib.import_module(f"{package}.weights")
    with open_source(find_checkpoint(path)) as source:
        with torch.device("meta"):
            model: nn.Module = model_code.build(config)
        fill(
            model,
            weights_code.plan(config, source),
            source,
            dtype=dtype,
            device=device,
            progress=progress,
        )
        weights_code.finish(model, config, source, dtype=dtype, device=device)
    model.eval()
    return LoadedModel(model, config, model_code.attention_layer_names(config))


def fill(
    model: nn.Module,
    weights: LoadedWeights,
    source: WeightSource,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None = None,
) -> None:
    """Replace the meta parameters of ``model`` by the tensors that ``weights`` names.

    Raises:
        ModelError: tensors are missing or superfluous, or a shape is wrong.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    _check_names(weights, source)
    for number, rule in enumerate(weights.rules):
        if progress is not None:
            progress(rule.parameter, number / len(weights.rules))
        expected = parameters[rule.parameter].shape
        # On the device before any part arrives, so that the peak is one checkpoint tensor, not two models.
        target = torch.empty(expected, dtype=dtype, device=device)
        start = 0
        for name, rows, adapt in zip(rule.sources, rule.rows, rule.adapt, strict=True):
            want, found = (rows, *expected[1:]), source.shape(name)
            if found != want:
                raise ModelError(
                    f"tensor {name} has shape {list(found)}, expected {list(want)}",
                    where=source.where,
                    hint="The weights do not belong to this configuration",
                )
            tensor = source.read(name)
            target[start : start + rows].copy_(adapt(tensor) if adapt else tensor)
            start += rows
        _replace(model, rule.parameter, nn.Parameter(target, requires_grad=False))
    if progress is not None:
        progress("weights are loaded", 1.0)


def _check_names(weights: LoadedWeights, source: WeightSource) -> None:
    needed = {name for rule in weights.rules for name in rule.sources}
    present = source.names()
    missing = sorted(needed - present)
    if missing:
        raise ModelError(
            f"{len(missing)} of {len(needed)} tensors are missing: {_some(missing)}",
            where=source.where,
            hint="The checkpoint is incomplete, or its configuration describes another model",
        )
    unknown = sorted(present - needed - weights.ignored)
    if unknown:
        raise ModelError(
            f"{len(unknown)} tensors are unknown to the architecture: {_some(unknown)}",
            where=source.where,
            hint="Leaving them out would change the answers, so nothing was loaded",
        )


def _some(names: list[str], limit: int = 4) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def _replace(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, parameter)
