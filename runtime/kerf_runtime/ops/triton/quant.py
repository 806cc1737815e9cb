"""FP8 quantisation kernels, and the pieces that the norm and activation kernels share with them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kerf_runtime.ops.fp8 import (
    FP8_MAX,
    FP8_MAX_RECIPROCAL,
    SMALLEST_SCALE,
    empty_fp8,
    empty_row_scale,
)

__all__ = [
    "DYNAMIC",
    "NONE",
    "STATIC",
    "as_rows",
    "dynamic_per_token_fp8_quant",
    "fp8",
    "row_launch",
    "row_scale",
    "static_scaled_fp8_quant",
    "tile_launch",
]

# How a kernel ends, as a compile-time constant: the rounded value, or FP8 with a given or computed scale.
NONE, STATIC, DYNAMIC = 0, 1, 2

_FP8_MAX = tl.constexpr(FP8_MAX)
_FP8_MAX_RECIPROCAL = tl.constexpr(FP8_MAX_RECIPROCAL)
_SMALLEST_SCALE = tl.constexpr(SMALLEST_SCALE)
_STATIC = tl.constexpr(STATIC)
_TILE = 2048


@triton.jit
def row_scale(value):
    """The scale of one row: ``value`` float32 [BLOCK], zeros beyond the row."""
    largest = tl.max(tl.abs(value), axis=0)
    return tl.maximum(largest * _FP8_MAX_RECIPROCAL, _SMALLEST_SCALE)


@triton.jit
def fp8(value, scale):
    """``value / scale`` in FP8, rounded to nearest even; not a number stays not a number."""
    scaled = tl.clamp(
        value * tl.div_rn(1.0, scale), -_FP8_MAX, _FP8_MAX, propagate_nan=tl.PropagateNan.ALL
    )
    return scaled.to(tl.float8e4nv)


@triton.jit
def _quant_kernel(x, scale, out, x_stride, width, MODE: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    value = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if MODE == _STATIC:
        factor = tl.load(scale)
    else:
        factor = row_scale(value)
        tl.store(scale + row, factor)
    tl.store(out + row * width + columns, fp8(value, factor), mask=mask)


def as_rows(x: Tensor) -> Tensor:
    """x as [rows, width] whose rows are contiguous; a view where possible."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def row_launch(rows: int, width: int) -> tuple[tuple[int, int], int, int]:
    """Grid, block and warps for one program per row: the whole row is in registers."""
    block = triton.next_power_of_2(width)
    return (rows, 1), block, min(max(block // 256, 1), 16 if block <= 16384 else 32)


def tile_launch(rows: int, width: int) -> tuple[tuple[int, int], int, int]:
    """Grid, block and warps where columns are independent: several programs share a row."""
    block = min(triton.next_power_of_2(width), _TILE)
    return (rows, triton.cdiv(width, block)), block, max(block // 256, 1)


def static_scaled_fp8_quant(x: Tensor, scale: Tensor) -> Tensor:
    """See ``kerf_runtime.ops.quant.static_scaled_fp8_quant_native``."""
    rows, out = as_rows(x), empty_fp8(x)
    if x.numel():
        grid, block, warps = tile_launch(*rows.shape)
        _quant_kernel[grid](
            rows,
            scale,
            out,
            rows.stride(0),
            rows.shape[1],
            MODE=STATIC,
            BLOCK=block,
            num_warps=warps,
        )
    return out


def dynamic_per_token_fp8_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    """See ``kerf_runtime.ops.quant.dynamic_per_token_fp8_quant_native``."""
    rows, out, scale = as_rows(x), empty_fp8(x), empty_row_scale(x)
    if x.numel():
        grid, block, warps = row_launch(*rows.shape)
        _quant_kernel[grid](
            rows,
            scale,
            out,
            rows.stride(0),
            rows.shape[1],
            MODE=DYNAMIC,
            BLOCK=block,
            num_warps=warps,
        )
    return out, scale
