"""FP8 quantisation operators: ``kerf::static_scaled_fp8_quant`` and ``kerf::dynamic_per_token_fp8_quant``.

Divisions are products with a reciprocal, in every form: a GPU has no fast division that rounds, and ATen divides by a
constant in one way on the CPU and in another on CUDA.  The native functions are the one definition of the numbers:
they are what Inductor sees, what the CPU runs, and what the Triton kernels are compared with.
"""

from __future__ import annotations

from torch import Tensor
from torch.library import Library, register_fake

from kerf_runtime.ops.fp8 import (
    FP8,
    FP8_MAX,
    FP8_MAX_RECIPROCAL,
    SMALLEST_SCALE,
    check_scale,
    empty_fp8,
    empty_row_scale,
)

__all__ = ["dynamic_per_token_fp8_quant_native", "static_scaled_fp8_quant_native"]


def static_scaled_fp8_quant_native(x: Tensor, scale: Tensor) -> Tensor:
    """Quantise with a scale that is known beforehand.

    Args:
        x: [..., E].
        scale: float32 [1].

    Returns:
        FP8 [..., E]: ``x / scale`` clamped to +-448 and rounded to nearest even.
    """
    return (x.float() * scale.reciprocal()).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def dynamic_per_token_fp8_quant_native(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise every row with the scale that maps its largest magnitude to 448.

    Args:
        x: [..., E].

    Returns:
        FP8 [..., E] and float32 [..., 1].
    """
    wide = x.float()
    scale = (wide.abs().amax(dim=-1, keepdim=True) * FP8_MAX_RECIPROCAL).clamp(min=SMALLEST_SCALE)
    return (wide * scale.reciprocal()).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


# A module-level owner: the registration lives as long as the Library object.
_library = Library("kerf", "FRAGMENT")
_library.define("static_scaled_fp8_quant(Tensor x, Tensor scale) -> Tensor")
_library.define("dynamic_per_token_fp8_quant(Tensor x) -> (Tensor, Tensor)")


def _static_cpu(x: Tensor, scale: Tensor) -> Tensor:
    check_scale(scale)
    return static_scaled_fp8_quant_native(x, scale).contiguous()


def _static_cuda(x: Tensor, scale: Tensor) -> Tensor:
    from kerf_runtime.ops.triton import quant  # Triton is for processes that run on a GPU only

    check_scale(scale)
    return quant.static_scaled_fp8_quant(x, scale)


def _dynamic_cpu(x: Tensor) -> tuple[Tensor, Tensor]:
    q, scale = dynamic_per_token_fp8_quant_native(x)
    return q.contiguous(), scale.contiguous()


def _dynamic_cuda(x: Tensor) -> tuple[Tensor, Tensor]:
    from kerf_runtime.ops.triton import quant

    return quant.dynamic_per_token_fp8_quant(x)


_library.impl("static_scaled_fp8_quant", _static_cpu, "CPU")
_library.impl("static_scaled_fp8_quant", _static_cuda, "CUDA")
_library.impl("dynamic_per_token_fp8_quant", _dynamic_cpu, "CPU")
_library.impl("dynamic_per_token_fp8_quant", _dynamic_cuda, "CUDA")


@register_fake("kerf::static_scaled_fp8_quant", lib=_library)
def _static_fake(x: Tensor, scale: Tensor) -> Tensor:
    check_scale(scale)
    return empty_fp8(x)


@register_fake("kerf::dynamic_per_token_fp8_quant", lib=_library)
def _dynamic_fake(x: Tensor) -> tuple[Tensor, Tensor]:
    return empty_fp8(x), empty_row_scale(x)
