"""Small models whose layers do exactly what one pass looks for, in a chosen form.

Shapes: T tokens, E = 32 hidden size, F = 24 intermediate size.  After every quantisation there is a
product with a matrix, as in a model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import kerf_runtime.ops.attention  # noqa: F401  registers torch.ops.kerf.attention
from kerf_runtime.ops.activation import silu_and_mul_native
from kerf_runtime.ops.norm import fused_add_rms_norm_native, rms_norm_native
from kerf_runtime.ops.quant import (
    dynamic_per_token_fp8_quant_native,
    static_scaled_fp8_quant_native,
)

kerf = torch.ops.kerf

E, F, HEADS = 32, 24, 4
EPS = 1e-5

RMS_NORM = {"custom": kerf.rms_norm, "native": rms_norm_native}
FUSED_ADD = {"custom": kerf.fused_add_rms_norm, "native": fused_add_rms_norm_native}
SILU_AND_MUL = {"custom": kerf.silu_and_mul, "native": silu_and_mul_native}
STATIC = {"custom": kerf.static_scaled_fp8_quant, "native": static_scaled_fp8_quant_native}
DYNAMIC = {"custom": kerf.dynamic_per_token_fp8_quant, "native": dynamic_per_token_fp8_quant_native}


def quantiser(kind: str, form: str) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """``(x, scale) -> (q, scale)`` for a kind (static, dynamic) and a form (custom, native)."""
    if kind == "static":
        return lambda x, scale: (STATIC[form](x, scale), scale)
    return lambda x, scale: DYNAMIC[form](x)


def tokens(count: int, *, width: int = E, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random activations, [count, width]."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(count)).to(dtype)


class Layers(nn.Module):
    """N layers with weights of their own."""

    def __init__(self, count: int, dtype: torch.dtype = torch.bfloat16, width: int = E) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)

        def parameters(*shape: int, low: float = -0.3, high: float = 0.3) -> nn.ParameterList:
            return nn.ParameterList(
                torch.empty(*shape).uniform_(low, high, generator=generator).to(dtype)
                for _ in range(count)
            )

        self.count, self.dtype, self.width = count, dtype, width
        self.norms = parameters(width, low=0.5, high=1.5)
        self.matrices = parameters(width, width)
        self.gates = parameters(width, 2 * F)
        self.downs = parameters(F, width)
        scales = torch.linspace(0.02, 0.03, max(count, 1))
        for index in range(count):
            self.register_buffer(f"scale_{index}", scales[index : index + 1].clone())

    def scale(self, index: int) -> Tensor:
        scale: Tensor = getattr(self, f"scale_{index}")
        return scale

    def product(self, q: Tensor, scale: Tensor, matrix: Tensor) -> Tensor:
        """What an FP8 matrix product gives."""
        return (q.float() * scale).to(self.dtype) @ matrix


class NormQuant(Layers):
    """RMSNorm, quantisation, matrix."""

    def __init__(self, count: int, norm: str, quant: Callable[..., Any], **options: Any) -> None:
        super().__init__(count, **options)
        self.norm, self.quant = RMS_NORM[norm], quant

    def forward(self, x: Tensor) -> Tensor:
        for i in range(self.count):
            q, scale = self.quant(self.norm(x, self.norms[i], EPS), self.scale(i))
            x = torch.tanh(self.product(q, scale, self.matrices[i]))
        return x


class AddNormQuant(Layers):
    """Add and RMSNorm, quantisation, matrix; the residual goes through all layers and out."""

    def __init__(self, count: int, norm: str, quant: Callable[..., Any], **options: Any) -> None:
        super().__init__(count, **options)
        self.norm, self.quant = FUSED_ADD[norm], quant

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        residual = torch.sin(x)
        for i in range(self.count):
            normed, residual = self.norm(x, residual, self.norms[i], EPS)
            q, scale = self.quant(normed, self.scale(i))
            x = torch.tanh(self.product(q, scale, self.matrices[i]))
        return x, residual


class ActivationQuant(Layers):
    """Gate and up projection, SiLU-and-mul, quantisation, down projection."""

    def __init__(self, count: int, act: str, quant: Callable[..., Any], **options: Any) -> None:
        super().__init__(count, **options)
        self.act, self.quant = SILU_AND_MUL[act], quant

    def forward(self, x: Tensor) -> Tensor:
        for i in range(self.count):
            q, scale = self.quant(self.act(x @ self.gates[i]), self.scale(i))
            x = torch.tanh(self.product(q, scale, self.downs[i]))
        return x


class AttentionQuant(Layers):
    """Attention inside the graph, quantisation of its output through a view, output projection."""

    def __init__(self, count: int, quant: Callable[..., Any], **options: Any) -> None:
        super().__init__(count, **options)
        self.quant = quant

    def attend(self, x: Tensor, index: int) -> Tensor:
        q = (x @ self.matrices[index]).view(-1, HEADS, self.width // HEADS)
        output = torch.empty_like(q)
        kerf.attention(q, q * 0.5, q * 2, output, f"layer.{index}")
        return output.view(-1, self.width)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(self.count):
            q, scale = self.quant(self.attend(x, i), self.scale(i))
            x = torch.tanh(self.product(q, scale, self.matrices[i]))
        return x


def attention_layer_names(count: int) -> tuple[str, ...]:
    """Names that ``AttentionQuant`` gives its layers."""
    return tuple(f"layer.{index}" for index in range(count))
