"""FP8 as the operators and kernels use it: the data type, its limits, and tensors of it.

FP8 is ``torch.float8_e4m3fn``, whose largest finite value is 448.  A quantised value stands for
``q * scale``; scales are float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "FP8",
    "FP8_MAX",
    "FP8_MAX_RECIPROCAL",
    "SMALLEST_SCALE",
    "check_scale",
    "empty_fp8",
    "empty_row_scale",
]

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
FP8_MAX_RECIPROCAL = 1.0 / 448.0
SMALLEST_SCALE = 2.0**-100
"""Floor of a dynamic scale: a row of zeros has some scale, and no scale is a denormal number."""


def empty_fp8(like: Tensor) -> Tensor:
    """A contiguous FP8 tensor of the shape of ``like``."""
    return torch.empty(like.shape, dtype=FP8, device=like.device)


def empty_row_scale(like: Tensor) -> Tensor:
    """One float32 scale per row of ``like``: [..., 1]."""
    return torch.empty((*like.shape[:-1], 1), dtype=torch.float32, device=like.device)


def check_scale(scale: Tensor) -> None:
    """Refuse what is no per-tensor scale."""
    torch._check(
        scale.dtype is torch.float32 and scale.numel() == 1,
        lambda: f"scale must be one float32 value, found {scale.dtype} {list(scale.shape)}",
    )
