"""Norms as layers: with their weights, and with the residual addition where there is a residual."""

from __future__ import annotations

from typing import ClassVar, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kerf_runtime.layers.custom_op import CustomOp
from kerf_runtime.ops.norm import fused_add_rms_norm_native, rms_norm_native

__all__ = ["FusedAddRMSNormOp", "LayerNorm", "RMSNorm", "RMSNormOp"]


class RMSNormOp(CustomOp):
    """``kerf::rms_norm``: x [T, E], weight [E] -> [T, E]."""

    name: ClassVar[str] = "rms_norm"

    def forward_native(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The ATen form."""
        return rms_norm_native(x, weight, eps)

    def forward_custom(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The custom operator."""
        out: Tensor = torch.ops.kerf.rms_norm(x, weight, eps)
        return out


class FusedAddRMSNormOp(CustomOp):
    """``kerf::fused_add_rms_norm``: x, residual [T, E], weight [E] -> normed sum, sum."""

    name: ClassVar[str] = "fused_add_rms_norm"

    def forward_native(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """The ATen form."""
        return fused_add_rms_norm_native(x, residual, weight, eps)

    def forward_custom(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """The custom operator."""
        out: tuple[Tensor, Tensor] = torch.ops.kerf.fused_add_rms_norm(x, residual, weight, eps)
        return out


class RMSNorm(nn.Module):
    """Root-mean-square normalisation with a weight, computed in float32 (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.plain = RMSNormOp()
        self.add = FusedAddRMSNormOp()

    @overload
    def forward(self, x: Tensor) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The norm of x [T, E]; with a residual, the norm of ``x + residual`` and that sum."""
        if residual is None:
            normed: Tensor = self.plain(x, self.weight, self.eps)
            return normed
        both: tuple[Tensor, Tensor] = self.add(x, residual, self.weight, self.eps)
        return both


class LayerNorm(nn.Module):
    """Normalisation to mean 0 and variance 1, then weight and bias, in float32 inside (Ba et al., 2016).

    It has one form only, ATen.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size))
        self.eps = eps

    @overload
    def forward(self, x: Tensor) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The norm of x [T, E]; with a residual, the norm of ``x + residual`` and that sum."""
        total = x if residual is None else x + residual
        normed = F.layer_norm(total, self.weight.shape, self.weight, self.bias, self.eps)
        return normed if residual is None else (normed, total)
