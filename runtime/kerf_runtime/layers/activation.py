"""Activations as layers: that of SwiGLU, and those of plain MLPs."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kerf_runtime.layers.custom_op import CustomOp
from kerf_runtime.ops.activation import silu_and_mul_native

__all__ = ["Activation", "SiluAndMul"]


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


class Activation(nn.Module):
    """An elementwise activation by name, [T, F] -> [T, F]; it has one form only, ATen.

    Args:
        kind: ``relu``, ``gelu``, or ``gelu_tanh`` (gelu by a formula with tanh; Hendrycks and Gimpel, 2016).
    """

    def __init__(self, kind: Literal["relu", "gelu", "gelu_tanh"]) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        if self.kind == "relu":
            return F.relu(x)
        return F.gelu(x, approximate="tanh" if self.kind == "gelu_tanh" else "none")
