"""Whatever product is the fastest for a static size: Inductor can make it, and the loader knows it."""

from __future__ import annotations

import pytest
import torch
from tests.compilation.backends.fake_gpu import tuned_wrapper
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from kerf_runtime.compilation.loader import parse_wrapper
from kerf_runtime.layers.linear import scaled_matmul
from kerf_runtime.ops.fp8 import FP8

TOKENS, INPUTS, OUTPUTS = 8, 256, 512


def wrapper(function, shapes, fastest):
    """The wrapper of a piece, of tensors of these shapes and data types."""
    with FakeTensorMode():
        values = [torch.empty(shape, dtype=dtype, device="cuda") for shape, dtype in shapes]
    return tuned_wrapper(make_fx(function)(*values), values, fastest)


@pytest.mark.parametrize(
    ("fastest", "product"),
    [
        ("addmm", "extern_kernels.addmm("),
        ("bias_addmm", "extern_kernels.bias_addmm("),
        ("triton", "triton_tem_"),
    ],
)
def test_of_a_linear_layer_with_a_bias(fastest, product):
    shapes = [(TOKENS, INPUTS), (OUTPUTS, INPUTS), (OUTPUTS,)]

    def piece(x, weight, bias):
        return (torch.nn.functional.silu(torch.nn.functional.linear(x, weight, bias)),)

    source = wrapper(piece, [(shape, torch.bfloat16) for shape in shapes], fastest)
    parse_wrapper(source)
    assert product in source


@pytest.mark.parametrize(
    ("fastest", "product", "scale"),
    [
        ("_scaled_mm", "extern_kernels._scaled_mm(", (TOKENS, 1)),
        ("triton", "triton_tem_", (1,)),
    ],
)
def test_of_an_fp8_layer(fastest, product, scale):
    shapes = [((TOKENS, INPUTS), FP8), ((OUTPUTS, INPUTS), FP8)]
    shapes += [(shape, torch.float32) for shape in (scale, (OUTPUTS, 1), (1,))]

    def piece(q, weight, scale, weight_scale, unit):
        bfloat16 = torch.bfloat16
        return (scaled_matmul(q, weight, scale, weight_scale, None, dtype=bfloat16, unit=unit),)

    source = wrapper(piece, shapes, fastest)
    parse_wrapper(source)
    assert product in source
