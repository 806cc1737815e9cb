"""RMSNorm operators: plain, with the residual addition in front, and with FP8 quantisation behind.

RMSNorm (Zhang and Sennrich, 2019) is computed in float32, rounded to the data type of ``x``, and
multiplied by the weight.  A quantised variant quantises that rounded product: it gives exactly what the
separate operators give, in one kernel.

Shapes: x and residual [..., E], weight [E], all of one data type; scale float32 [1].  The native functions
are the one definition of the numbers; see ``ops.quant``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import Library, register_fake

from kerf_runtime.ops.fp8 import check_scale, empty_fp8, empty_row_scale
from kerf_runtime.ops.quant import (
    dynamic_per_token_fp8_quant_native,
    static_scaled_fp8_quant_native,
)

__all__ = [
    "fused_add_rms_norm_dynamic_per_token_fp8_quant_native",
    "fused_add_rms_norm_native",
    "fused_add_rms_norm_static_fp8_quant_native",
    "rms_norm_dynamic_per_token_fp8_quant_native",
    "rms_norm_native",
    "rms_norm_static_fp8_quant_native",
]


def rms_norm_native(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * x / sqrt(mean(x^2) + eps)``: [..., E] -> [..., E]."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def fused_add_rms_norm_native(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The norm of ``x + residual``, and the sum, which is the next residual."""
    total = x + residual
    return rms_norm_native(total, weight, eps), total


def rms_norm_static_fp8_quant_native(
    x: Tensor, weight: Tensor, scale: Tensor, eps: float
) -> Tensor:
    """FP8 [..., E]."""
    return static_scaled_fp8_quant_native(rms_norm_native(x, weight, eps), scale)


def rms_norm_dynamic_per_token_fp8_quant_native(
    x: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """FP8 [..., E] and its scales, float32 [..., 1]."""
    return dynamic_per_token_fp8_quant_native(rms_norm_native(x, weight, eps))


def fused_add_rms_norm_static_fp8_quant_native(
    x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """FP8 [..., E] and the next residual."""
    normed, total = fused_add_rms_norm_native(x, residual, weight, eps)
    return static_scaled_fp8_quant_native(normed, scale), total


def fused_add_rms_norm_dynamic_per_token_fp8_quant_native(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """FP8 [..., E], its scales, float32 [..., 1], and the next residual."""
    normed, total = fused_add_rms_norm_native(x, residual, weight, eps)
    q, scale = dynamic_per_token_fp8_quant_native(normed)
    return q, scale, total


def _check(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> None:
    torch._check(
        weight.dtype is x.dtype and (residual is None or residual.dtype is x.dtype),
        lambda: f"x, weight and residual must share one data type, found {x.dtype}, {weight.dtype}",
    )
    torch._check(
        weight.dim() == 1 and weight.shape[0] == x.shape[-1],
        lambda: f"weight {list(weight.shape)} does not fit x {list(x.shape)}",
    )


# A module-level owner: the registration lives as long as the Library object.
_library = Library("kerf", "FRAGMENT")
_library.define("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor")
_library.define(
    "fused_add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)"
)
_library.define(
    "rms_norm_static_fp8_quant(Tensor x, Tensor weight, Tensor scale, float eps) -> Tensor"
)
_library.define(
    "rms_norm_dynamic_per_token_fp8_quant(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)"
)
_library.define(
    "fused_add_rms_norm_static_fp8_quant(Tensor x, Tensor residual, Tensor weight, Tensor scale, "
    "float eps) -> (Tensor, Tensor)"
)
_library.define(
    "fused_add_rms_norm_dynamic_per_token_fp8_quant(Tensor x, Tensor residual, Tensor weight, "
    "float eps) -> (Tensor, Tensor, Tensor)"
)


def _rms_norm_cpu(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    _check(x, weight)
    return rms_norm_native(x, weight, eps).contiguous()


def _rms_norm_cuda(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    from kerf_runtime.ops.triton import norm  # Triton is for processes that run on a GPU only

    _check(x, weight)
    return norm.rms_norm(x, weight, eps)


def _fused_add_cpu(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    _check(x, weight, residual)
    normed, total = fused_add_rms_norm_native(x, residual, weight, eps)
    return normed.contiguous(), total.contiguous()


def _fused_add_cuda(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    from kerf_runtime.ops.triton import norm

    _check(x, weight, residual)
    return norm.fused_add_rms_norm(x, residual, weight, eps)


def _static_cpu(x: Tensor, weight: Tensor, scale: Tensor, eps: float) -> Tensor:
    _check(x, weight)
    check_scale(scale)
    return rms_norm_static_fp8_quant_native(x, weight, scale, eps).contiguous()


def _static_cuda(x: Tensor, weight: Tensor, scale: Tensor, eps: float) -> Tensor:
    from kerf_runtime.ops.triton import norm

    _check(x, weight)
    check_scale(scale)
    return norm.rms_norm_static_fp8_quant(x, weight, scale, eps)


def _dynamic_cpu(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    _check(x, weight)
    q, scale = rms_norm_dynamic_per_token_fp8_quant_native(x, weight, eps)
    return q.contiguous(), scale.contiguous()


def _dynamic_cuda(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    from kerf_runtime.ops.triton import norm

    _check(x, weight)
    return norm.rms_norm_dynamic_per_token_fp8_quant(x, weight, eps)


def _fused_add_static_cpu(
    x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    _check(x, weight, residual)
    check_scale(scale)
    q, total = fused_add_rms_norm_static_fp8_quant_native(x, residual, weight, scale, eps)
    return q.contiguous(), total.contiguous()


def _fused_add_static_cuda(
    x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    from kerf_runtime.ops.triton import norm

    _check(x, weight, residual)
    check_scale(scale)
    return norm.fused_add_rms_norm_static_fp8_quant(x, residual, weight, scale, eps)


def _fused_add_dynamic_cpu(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    _check(x, weight, residual)
    q, scale, total = fused_add_rms_norm_dynamic_per_token_fp8_quant_native(
        x, residual, weight, eps
    )
    return q.contiguous(), scale.contiguous(), total.contiguous()


def _fused_add_dynamic_cuda(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    from kerf_runtime.ops.triton import norm

    _check(x, weight, residual)
    return norm.fused_add_rms_norm_dynamic_per_token_fp8_quant(x, residual, weight, eps)


_library.impl("rms_norm", _rms_norm_cpu, "CPU")
_library.impl("rms_norm", _rms_norm_cuda, "CUDA")
_library.impl("fused_add_rms_norm", _fused_add_cpu, "CPU")
_library.impl("fused_add_rms_norm", _fused_add_cuda, "CUDA")
_library.impl("rms_norm_static_fp8_quant", _static_cpu, "CPU")
_library.impl("rms_norm_static_fp8_quant", _static_cuda, "CUDA")
_library.impl("rms_norm_dynamic_per_token_fp8_quant", _dynamic_cpu, "CPU")
_library.impl("rms_norm_dynamic_per_token_fp8_quant", _dynamic_cuda, "CUDA")
_library.impl("fused_add_rms_norm_static_fp8_quant", _fused_add_static_cpu, "CPU")
_library.impl("fused_add_rms_norm_static_fp8_quant", _fused_add_static_cuda, "CUDA")
_library.impl("fused_add_rms_norm_dynamic_per_token_fp8_quant", _fused_add_dynamic_cpu, "CPU")
_library.impl("fused_add_rms_norm_dynamic_per_token_fp8_quant", _fused_add_dynamic_cuda, "CUDA")


@register_fake("kerf::rms_norm", lib=_library)
def _rms_norm_fake(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    _check(x, weight)
    return x.new_empty(x.shape)


@register_fake("kerf::fused_add_rms_norm", lib=_library)
def _fused_add_fake(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    _check(x, weight, residual)
    return x.new_empty(x.shape), x.new_empty(x.shape)


@register_fake("kerf::rms_norm_static_fp8_quant", lib=_library)
def _static_fake(x: Tensor, weight: Tensor, scale: Tensor, eps: float) -> Tensor:
    _check(x, weight)
    check_scale(scale)
    return empty_fp8(x)


@register_fake("kerf::rms_norm_dynamic_per_token_fp8_quant", lib=_library)
def _dynamic_fake(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    _check(x, weight)
    return empty_fp8(x), empty_row_scale(x)


@register_fake("kerf::fused_add_rms_norm_static_fp8_quant", lib=_library)
def _fused_add_static_fake(
    x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    _check(x, weight, residual)
    check_scale(scale)
    return empty_fp8(x), x.new_empty(x.shape)


@register_fake("kerf::fused_add_rms_norm_dynamic_per_token_fp8_quant", lib=_library)
def _fused_add_dynamic_fake(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    _check(x, weight, residual)
    return empty_fp8(x), empty_row_scale(x), x.new_empty(x.shape)
