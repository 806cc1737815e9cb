"""SwiGLU's activation as a layer."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from kerf_runtime.layers.custom_op import CustomOp
from kerf_runtime.ops.activation import silu_and_mul_native

__all__ = ["SiluAndMul"]


class SiluAndMul(CustomOp):
    """``kerf::silu_and_mul``: gate and up side by side, [T, 2F] -> [T, F]."""

    name: ClassVar[str] = "silu_and_mul"

    def forward_native(self, x: Tensor) -> Tensor:
        """The ATen form."""
        return silu_and_mul_native(x)

    def forward_custom(self, x: Tensor) -> Tensor:
        """The custom operator."""
        out: Tensor = torch.ops.kerf.silu_and_mul(x)
        return out
