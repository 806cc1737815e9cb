"""Every custom operator with its native form, its Triton form and inputs; shared by CPU and GPU tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kerf_runtime.ops import activation, norm, quant, rotary

EPS = 1e-5


@dataclass(frozen=True)
class Case:
    """One operator and its arguments.

    Attributes:
        name: of the operator and of its Triton function.
        triton_module: where the Triton function is, below ``kerf_runtime.ops.triton``.
        native: its ATen form.
        args: tensors and numbers.
    """

    name: str
    triton_module: str
    native: Callable[..., Any]
    args: tuple[Any, ...]

    @property
    def operator(self) -> Any:
        return getattr(torch.ops.kerf, self.name)


def cases(
    rows: int, width: int, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
) -> list[Case]:
    """All operators on ``rows`` rows of ``width`` (a multiple of 4) elements."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    x, residual, weight = 3 * normal(rows, width), normal(rows, width), normal(width) + 1
    gated = normal(rows, 2 * width)
    scale = torch.tensor([0.021], device=device)
    # A view into a fused projection, as the model passes it: rows lie further apart than they are wide.
    heads = normal(rows, width + 8)[:, :width].view(rows, 2, width // 2)
    angles = torch.rand(rows, 1, width // 4, generator=generator, device=device) * 6
    return [
        Case("rms_norm", "norm", norm.rms_norm_native, (x, weight, EPS)),
        Case(
            "fused_add_rms_norm", "norm", norm.fused_add_rms_norm_native, (x, residual, weight, EPS)
        ),
        Case(
            "rms_norm_static_fp8_quant",
            "norm",
            norm.rms_norm_static_fp8_quant_native,
            (x, weight, scale, EPS),
        ),
        Case(
            "rms_norm_dynamic_per_token_fp8_quant",
            "norm",
            norm.rms_norm_dynamic_per_token_fp8_quant_native,
            (x, weight, EPS),
        ),
        Case(
            "fused_add_rms_norm_static_fp8_quant",
            "norm",
            norm.fused_add_rms_norm_static_fp8_quant_native,
            (x, residual, weight, scale, EPS),
        ),
        Case(
            "fused_add_rms_norm_dynamic_per_token_fp8_quant",
            "norm",
            norm.fused_add_rms_norm_dynamic_per_token_fp8_quant_native,
            (x, residual, weight, EPS),
        ),
        Case("silu_and_mul", "activation", activation.silu_and_mul_native, (gated,)),
        Case(
            "silu_and_mul_static_fp8_quant",
            "activation",
            activation.silu_and_mul_static_fp8_quant_native,
            (gated, scale),
        ),
        Case(
            "silu_and_mul_dynamic_per_token_fp8_quant",
            "activation",
            activation.silu_and_mul_dynamic_per_token_fp8_quant_native,
            (gated,),
        ),
        Case("static_scaled_fp8_quant", "quant", quant.static_scaled_fp8_quant_native, (x, scale)),
        Case(
            "dynamic_per_token_fp8_quant", "quant", quant.dynamic_per_token_fp8_quant_native, (x,)
        ),
        Case(
            "rotary_embedding",
            "rotary",
            rotary.rotary_embedding_native,
            (heads, angles.cos().to(dtype), angles.sin().to(dtype)),
        ),
    ]


def results(value: Any) -> tuple[Tensor, ...]:
    """The results of an operator as a tuple."""
    return value if isinstance(value, tuple) else (value,)


def assert_close(found: Any, expected: Any, dtype: torch.dtype) -> None:
    """Equal but for the last bit: sums are added up in another order, so a rounding may fall otherwise.

    One step of FP8 (e4m3, 3 bits after the point) is 1/8 of a value; at most 2 in 1000 may be off by one
    step, which the rounding of one bf16 norm to the other side of an FP8 boundary explains.
    """
    step = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
    for one, other in zip(results(found), results(expected), strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.is_contiguous()
        if one.dtype is quant.FP8:
            one, other = one.float(), other.float()
            torch.testing.assert_close(one, other, rtol=0.13, atol=2.0**-8, equal_nan=True)
            assert (
                not one.numel() or (one.nan_to_num(0) != other.nan_to_num(0)).float().mean() <= 2e-3
            )
        else:
            rtol = max(step[dtype], step[one.dtype])
            torch.testing.assert_close(
                one, other, rtol=rtol, atol=step[one.dtype] / 8, equal_nan=True
            )
