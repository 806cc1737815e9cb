"""The SwiGLU kernel: tiles of a row, or a whole row where its largest value is needed."""

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
    tile_launch,
)

__all__ = [
    "silu_and_mul",
    "silu_and_mul_dynamic_per_token_fp8_quant",
    "silu_and_mul_static_fp8_quant",
]

_NONE = tl.constexpr(NONE)
_STATIC = tl.constexpr(STATIC)


@triton.jit
def _silu_kernel(x, scale, out, x_stride, width, MODE: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    kind = x.dtype.element_ty
    start = x + row * x_stride
    gate = tl.load(start + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(start + width + columns, mask=mask, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    result = (silu * up).to(kind)
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


def _launch(x: Tensor, mode: int, scale: Tensor | None = None) -> Tensor:
    rows = as_rows(x)
    width = x.shape[-1] // 2
    dtype = x.dtype if mode == NONE else FP8
    out = torch.empty((*x.shape[:-1], width), dtype=dtype, device=x.device)
    if out.numel():
        grid, block, warps = (row_launch if mode == DYNAMIC else tile_launch)(rows.shape[0], width)
        _silu_kernel[grid](
            rows,
            rows if scale is None else scale,
            out,
            rows.stride(0),
            width,
            MODE=mode,
            BLOCK=block,
            num_warps=warps,
        )
    return out


def silu_and_mul(x: Tensor) -> Tensor:
    """See ``kerf_runtime.ops.activation.silu_and_mul_native``."""
    return _launch(x, NONE)


def silu_and_mul_static_fp8_quant(x: Tensor, scale: Tensor) -> Tensor:
    """See ``kerf_runtime.ops.activation.silu_and_mul_static_fp8_quant_native``."""
    return _launch(x, STATIC, scale)


def silu_and_mul_dynamic_per_token_fp8_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    """See ``kerf_runtime.ops.activation.silu_and_mul_dynamic_per_token_fp8_quant_native``."""
    scale = empty_row_scale(x)
    return _launch(x, DYNAMIC, scale), scale
