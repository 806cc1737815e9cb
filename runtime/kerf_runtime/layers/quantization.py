"""The quantisation of activations to FP8 as layers, and of weights as a function."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from kerf_runtime.layers.custom_op import CustomOp
from kerf_runtime.ops.quant import (
    dynamic_per_token_fp8_quant_native,
    static_scaled_fp8_quant_native,
)

__all__ = ["DynamicQuantFP8", "StaticQuantFP8", "quantize_rows"]


class StaticQuantFP8(CustomOp):
    """``kerf::static_scaled_fp8_quant``: x [T, E], scale float32 [1] -> FP8 [T, E]."""

    name: ClassVar[str] = "quant_fp8"

    def forward_native(self, x: Tensor, scale: Tensor) -> Tensor:
        """The ATen form."""
        return static_scaled_fp8_quant_native(x, scale)

    def forward_custom(self, x: Tensor, scale: Tensor) -> Tensor:
        """The custom operator."""
        out: Tensor = torch.ops.kerf.static_scaled_fp8_quant(x, scale)
        return out


class DynamicQuantFP8(CustomOp):
    """``kerf::dynamic_per_token_fp8_quant``: x [T, E] -> FP8 [T, E], scales float32 [T, 1]."""

    name: ClassVar[str] = "quant_fp8"

    def forward_native(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The ATen form."""
        return dynamic_per_token_fp8_quant_native(x)

    def forward_custom(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The custom operator."""
        out: tuple[Tensor, Tensor] = torch.ops.kerf.dynamic_per_token_fp8_quant(x)
        return out


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight [N, K] with one scale per row (output channel): FP8 [N, K] and float32 [N, 1]."""
    return dynamic_per_token_fp8_quant_native(weight)
