"""The linear layers between embedding and head: plain, or in FP8 where the model is quantised."""

from __future__ import annotations

from kerf_runtime.layers.linear import Fp8Linear, Linear
from kerf_runtime.models.config import ModelConfig

__all__ = ["projection"]


def projection(config: ModelConfig, inputs: int, outputs: int, *, bias: bool) -> Linear | Fp8Linear:
    """[T, inputs] -> [T, outputs], quantised if the model is.

    Raises:
        ModelError: quantised, and a size is no multiple of 16.
    """
    if config.quantization is None:
        return Linear(inputs, outputs, bias=bias)
    return Fp8Linear(inputs, outputs, bias=bias, static=config.quantization.static)
