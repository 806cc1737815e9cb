"""The RMSNorm kernel: one program per row, with the residual addition and the quantisation inside."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kerf_runtime.ops.fp8 import FP8, empty_row_scale
from kerf_runtime.ops.triton.quant import (
    DYNAMIC,
    NONE,
    STATIC,
    as_rows,
    fp8,
    row_launch,
    row_scale,
)

__all__ = [
    "fused_add_rms_norm",
    "fused_add_rms_norm_dynamic_per_token_fp8_quant",
    "fused_add_rms_norm_static_fp8_quant",
    "rms_norm",
    "rms_norm_dynamic_per_token_fp8_quant",
    "rms_norm_static_fp8_quant",
]

_NONE = tl.constexpr(NONE)
_STATIC = tl.constexpr(STATIC)


@triton.jit
def _norm_kernel(
    x,
    residual,
    weight,
    scale,
    out,
    total,
    x_stride,
    residual_stride,
    width,
    eps,
    ADD: tl.constexpr,  # noqa: N803
    MODE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    kind = x.dtype.element_ty
    # The weight does not depend on the sum of squares: its load is in flight meanwhile.
    factor = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * residual_stride + columns, mask=mask, other=0.0).to(
            tl.float32
        )
        rounded = value.to(kind)
        tl.store(total + row * width + columns, rounded, mask=mask)
        value = rounded.to(tl.float32)
    mean = tl.sum(value * value, axis=0) / width
    normed = (value * (1.0 / tl.sqrt_rn(mean + eps))).to(kind).to(tl.float32)
    result = (normed * factor).to(kind)
    if MODE == _NONE:
        tl.store(out + row * width + columns, result, mask=mask)
    else:
        wide = result.to(tl.float32)
        if MODE == _STATIC:
            step = tl.load(scale)
        else:
            step = row_scale(wide)
            tl.store(scale + row, step)
        tl.store(out + row * width + columns, fp8(wide, step), mask=mask)


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    mode: int,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the kernel; the normed or quantised rows and the sum (``x`` itself without a residual)."""
    rows = as_rows(x)
    other = rows if residual is None else as_rows(residual)
    out = torch.empty(x.shape, dtype=x.dtype if mode == NONE else FP8, device=x.device)
    total = x if residual is None else x.new_empty(x.shape)
    if x.numel():
        grid, block, warps = row_launch(*rows.shape)
        _norm_kernel[grid](
            rows,
            other,
            weight,
            weight if scale is None else scale,
            out,
            total,
            rows.stride(0),
            other.stride(0),
            rows.shape[1],
            eps,
            ADD=residual is not None,
            MODE=mode,
            BLOCK=block,
            num_warps=warps,
        )
    return out, total


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``kerf_runtime.ops.norm.rms_norm_native``."""
    return _launch(x, None, weight, eps, NONE)[0]


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See ``kerf_runtime.ops.norm.fused_add_rms_norm_native``."""
    return _launch(x, residual, weight, eps, NONE)


def rms_norm_static_fp8_quant(x: Tensor, weight: Tensor, scale: Tensor, eps: float) -> Tensor:
    """See ``kerf_runtime.ops.norm.rms_norm_static_fp8_quant_native``."""
    return _launch(x, None, weight, eps, STATIC, scale)[0]


def rms_norm_dynamic_per_token_fp8_quant(
    x: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See ``kerf_runtime.ops.norm.rms_norm_dynamic_per_token_fp8_quant_native``."""
    scale = empty_row_scale(x)
    return _launch(x, None, weight, eps, DYNAMIC, scale)[0], scale


def fused_add_rms_norm_static_fp8_quant(
    x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See ``kerf_runtime.ops.norm.fused_add_rms_norm_static_fp8_quant_native``."""
    return _launch(x, residual, weight, eps, STATIC, scale)


def fused_add_rms_norm_dynamic_per_token_fp8_quant(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``kerf_runtime.ops.norm.fused_add_rms_norm_dynamic_per_token_fp8_quant_native``."""
    scale = empty_row_scale(x)
    q, total = _launch(x, residual, weight, eps, DYNAMIC, scale)
    return q, scale, total
