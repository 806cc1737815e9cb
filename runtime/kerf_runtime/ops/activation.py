"""SwiGLU operators: ``kerf::silu_and_mul``, and with FP8 quantisation behind it.

``silu(gate) * up`` (Shazeer, 2020), where ``x`` holds gate and up side by side: [..., 2F] -> [..., F].
``silu(gate)`` is rounded to the data type of ``x`` before the product, as the separate ATen operators do;
a quantised variant quantises the rounded product.  The native functions are the one definition of the
numbers; see ``ops.quant``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import Library, register_fake

from kerf_runtime.ops.fp8 import FP8, check_scale, empty_row_scale
from kerf_runtime.ops.quant import (
    dynamic_per_token_fp8_quant_native,
    static_scaled_fp8_quant_native,
)

__all__ = [
    "silu_and_mul_dynamic_per_token_fp8_quant_native",
    "silu_and_mul_native",
    "silu_and_mul_static_fp8_quant_native",
]


def silu_and_mul_native(x: Tensor) -> Tensor:
    """[..., 2F] -> [..., F]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def silu_and_mul_static_fp8_quant_native(x: Tensor, scale: Tensor) -> Tensor:
    """FP8 [..., F]; scale float32 [1]."""
    return static_scaled_fp8_quant_native(silu_and_mul_native(x), scale)


def silu_and_mul_dynamic_per_token_fp8_quant_native(x: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 [..., F] and its scales, float32 [..., 1]."""
    return dynamic_per_token_fp8_quant_native(silu_and_mul_native(x))


def _check(x: Tensor) -> None:
    torch._check(
        x.shape[-1] % 2 == 0, lambda: f"x {list(x.shape)} does not hold gate and up side by side"
    )


# A module-level owner: the registration lives as long as the Library object.
_library = Library("kerf", "FRAGMENT")
_library.define("silu_and_mul(Tensor x) -> Tensor")
_library.define("silu_and_mul_static_fp8_quant(Tensor x, Tensor scale) -> Tensor")
_library.define("silu_and_mul_dynamic_per_token_fp8_quant(Tensor x) -> (Tensor, Tensor)")


def _silu_and_mul_cpu(x: Tensor) -> Tensor:
    _check(x)
    return silu_and_mul_native(x).contiguous()


def _silu_and_mul_cuda(x: Tensor) -> Tensor:
    from kerf_runtime.ops.triton import activation  # Triton is for processes that run on a GPU only

    _check(x)
    return activation.silu_and_mul(x)


def _static_cpu(x: Tensor, scale: Tensor) -> Tensor:
    _check(x)
    check_scale(scale)
    return silu_and_mul_static_fp8_quant_native(x, scale).contiguous()


def _static_cuda(x: Tensor, scale: Tensor) -> Tensor:
    from kerf_runtime.ops.triton import activation

    _check(x)
    check_scale(scale)
    return activation.silu_and_mul_static_fp8_quant(x, scale)


def _dynamic_cpu(x: Tensor) -> tuple[Tensor, Tensor]:
    _check(x)
    q, scale = silu_and_mul_dynamic_per_token_fp8_quant_native(x)
    return q.contiguous(), scale.contiguous()


def _dynamic_cuda(x: Tensor) -> tuple[Tensor, Tensor]:
    from kerf_runtime.ops.triton import activation

    _check(x)
    return activation.silu_and_mul_dynamic_per_token_fp8_quant(x)


_library.impl("silu_and_mul", _silu_and_mul_cpu, "CPU")
_library.impl("silu_and_mul", _silu_and_mul_cuda, "CUDA")
_library.impl("silu_and_mul_static_fp8_quant", _static_cpu, "CPU")
_library.impl("silu_and_mul_static_fp8_quant", _static_cuda, "CUDA")
_library.impl("silu_and_mul_dynamic_per_token_fp8_quant", _dynamic_cpu, "CPU")
_library.impl("silu_and_mul_dynamic_per_token_fp8_quant", _dynamic_cuda, "CUDA")


def _half(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=dtype, device=x.device)


@register_fake("kerf::silu_and_mul", lib=_library)
def _silu_and_mul_fake(x: Tensor) -> Tensor:
    _check(x)
    return _half(x, x.dtype)


@register_fake("kerf::silu_and_mul_static_fp8_quant", lib=_library)
def _static_fake(x: Tensor, scale: Tensor) -> Tensor:
    _check(x)
    check_scale(scale)
    return _half(x, FP8)


@register_fake("kerf::silu_and_mul_dynamic_per_token_fp8_quant", lib=_library)
def _dynamic_fake(x: Tensor) -> tuple[Tensor, Tensor]:
    _check(x)
    return _half(x, FP8), empty_row_scale(x)
