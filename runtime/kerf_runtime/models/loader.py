"""From a path to a model with its weights, quantised if the checkpoint or the deployment says so.

The module is made on the meta device (no memory); ``parameters.fill`` gives it its parameters.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from kerf_runtime.config.deployment import LoadFormat
from kerf_runtime.config.engine import DType
from kerf_runtime.errors import ModelError
from kerf_runtime.models.checkpoint import find_checkpoint
from kerf_runtime.models.config import Fp8Scheme, ModelConfig
from kerf_runtime.models.describe import read_model_config
from kerf_runtime.models.dummy import NoTensors, fill_at_random
from kerf_runtime.models.parameters import Progress, fill
from kerf_runtime.models.registry import family_of
from kerf_runtime.models.sources import WeightSource, open_source

__all__ = ["LoadedModel", "load_model", "quantized", "torch_dtype"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run eagerly, and the facts it was built from.

    ``attention_layers`` are the names by which the attention operator finds its KV cache, ``windows`` the
    sliding windows of those layers that have one, in tokens.  ``mixer_layers`` are the names by which the mixer
    finds its states, if the model has state-space layers.
    """

    model: nn.Module
    config: ModelConfig
    attention_layers: tuple[str, ...]
    windows: Mapping[str, int] = field(default_factory=dict)
    mixer_layers: tuple[str, ...] = ()


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
    quantization: str | None = None,
    max_model_len: int | None = None,
    load_format: LoadFormat = LoadFormat.AUTO,
    progress: Progress | None = None,
) -> LoadedModel:
    """Build the model of a checkpoint and load its weights.

    Args:
        path: folder or GGUF file.
        dtype: of weights and activations; of activations and what stays unquantised in an FP8 model.
        device: where the parameters go.
        quantization: ``fp8`` quantises the linear layers while they are loaded, with one scale per
            output channel; their inputs are quantised per token.  A checkpoint that is FP8 already is
            loaded as it is.
        max_model_len: longest sequence that will be computed, in tokens; None for the model's own limit.
        load_format: dummy: of the checkpoint only its configuration is read, and weights are random.
        progress: told how far the weights are.

    Raises:
        ModelError: no such checkpoint, unsupported, or weights that are missing, of the wrong shape,
            damaged or unknown to the architecture; a quantisation that is not supported.
    """
    path = Path(path)
    config = quantized(read_model_config(path), quantization)
    family = family_of(config)
    model_code = importlib.import_module(family.model)
    weights_code = importlib.import_module(family.weights)
    with torch.device("meta"):
        model: nn.Module = model_code.build(config)
    with _source(path, load_format) as source:
        if load_format is LoadFormat.DUMMY:
            logger.warning("weights are random (loadFormat dummy): answers mean nothing")
            fill_at_random(model, dtype=dtype, device=device)
        else:
            plan = weights_code.plan(config, source)
            began = time.monotonic()
            fill(model, plan, source, dtype=dtype, device=device, progress=progress)
            _log_rate(model, time.monotonic() - began)
        weights_code.finish(model, config, source, dtype=dtype, device=device)
    model.eval()
    layers = model_code.attention_layer_names(config)
    windows = {layers[layer]: window for layer, window in config.windows(max_model_len).items()}
    mixers = () if config.state_shape is None else model_code.mixer_layer_names(config)
    return LoadedModel(model, config, layers, windows, mixers)


def _log_rate(model: nn.Module, seconds: float) -> None:
    size = sum(p.numel() * p.itemsize for p in model.parameters())
    logger.info(
        "weights: %.2f GiB in %.2f s (%.1f GB/s)", size / 2**30, seconds, size / seconds / 1e9
    )


def _source(path: Path, load_format: LoadFormat) -> WeightSource:
    if load_format is LoadFormat.DUMMY:
        return NoTensors(str(path))
    return open_source(find_checkpoint(path))


def quantized(config: ModelConfig, quantization: str | None) -> ModelConfig:
    """``config`` as it is when the deployment asks for ``quantization``.

    Raises:
        ModelError: not a quantisation that can be done while loading.
    """
    if quantization is None or config.quantization is not None:
        return config
    if quantization != "fp8":
        raise ModelError(
            f"weights cannot be quantised to {quantization!r} while they are loaded",
            where="engine.quantization",
            hint="Supported: fp8",
        )
    return replace(config, quantization=Fp8Scheme(static=False, stored=False))
