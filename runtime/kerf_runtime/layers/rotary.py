"""The rotation of queries and keys as a layer; the tables belong to the model."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from kerf_runtime.layers.custom_op import CustomOp
from kerf_runtime.ops.rotary import rotary_embedding_native

__all__ = ["Rotate"]


class Rotate(CustomOp):
    """``kerf::rotary_embedding``: x [T, H, D], cos and sin [T, 1, D/2] -> contiguous [T, H, D]."""

    name: ClassVar[str] = "rotary_embedding"

    def forward_native(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The ATen form."""
        return rotary_embedding_native(x, cos, sin)

    def forward_custom(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The custom operator."""
        out: Tensor = torch.ops.kerf.rotary_embedding(x, cos, sin)
        return out
