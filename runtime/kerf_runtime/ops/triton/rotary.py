"""The rotary kernel: one program per token and group of heads."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["rotary_embedding"]

_HEADS = 8
"""Heads per program: they share the cosines and sines, and a decode step still has many programs."""


@triton.jit
def _rotary_kernel(
    x,
    cos,
    sin,
    out,
    token_stride,
    head_stride,
    cos_stride,
    sin_stride,
    heads,
    half,
    HEADS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    column = tl.arange(0, BLOCK)
    inside = column < half
    mask = (head < heads) & inside[None, :]
    kind = x.dtype.element_ty
    c = tl.load(cos + token * cos_stride + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + token * sin_stride + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    source = x + token * token_stride + head * head_stride + column[None, :]
    low = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + half, mask=mask, other=0.0).to(tl.float32)
    # Rounded one by one, as the separate operators do.
    low_cos = (low * c).to(kind).to(tl.float32)
    low_sin = (low * s).to(kind).to(tl.float32)
    high_cos = (high * c).to(kind).to(tl.float32)
    high_sin = (high * s).to(kind).to(tl.float32)
    target = out + (token * heads + head) * (2 * half) + column[None, :]
    tl.store(target, (low_cos - high_sin).to(kind), mask=mask)
    tl.store(target + half, (high_cos + low_sin).to(kind), mask=mask)


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See ``kerf_runtime.ops.rotary.rotary_embedding_native``."""
    tokens, heads, size = x.shape
    x = x if x.stride(2) == 1 else x.contiguous()
    # Tables that are the same for every token have a stride of 0, which the kernel takes as it is.
    cos, sin = cos.expand(tokens, 1, size // 2), sin.expand(tokens, 1, size // 2)
    cos = cos if cos.stride(2) == 1 else cos.contiguous()
    sin = sin if sin.stride(2) == 1 else sin.contiguous()
    out = x.new_empty(x.shape)
    if x.numel():
        block = triton.next_power_of_2(size // 2)
        _rotary_kernel[(tokens, triton.cdiv(heads, _HEADS))](
            x,
            cos,
            sin,
            out,
            x.stride(0),
            x.stride(1),
            cos.stride(0),
            sin.stride(0),
            heads,
            size // 2,
            HEADS=_HEADS,
            BLOCK=block,
            num_warps=min(max(_HEADS * block // 256, 1), 8),
            # A fused multiply-add would skip the rounding of the product.
            enable_fp_fusion=False,
        )
    return out
