"""FP8 linear layers on the CPU: what they compute, how far they are from unquantised ones, what they refuse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kerf_runtime.errors import ModelError
from kerf_runtime.layers.linear import Fp8Linear, Linear, scaled_matmul
from kerf_runtime.layers.quantization import quantize_rows


def make_pair(
    *, static: bool, bias: bool, dtype: torch.dtype, inputs: int = 256, outputs: int = 96
) -> tuple[Linear, Fp8Linear, Tensor]:
    """The same matrix unquantised and in FP8, and an input [50, inputs]."""
    torch.manual_seed(0)
    plain = Linear(inputs, outputs, bias=bias)
    layer = Fp8Linear(inputs, outputs, bias=bias, static=static)
    x = torch.randn(50, inputs).to(dtype)
    plain.weight.data = torch.randn(outputs, inputs).to(dtype)
    q, scale = quantize_rows(plain.weight.data)
    layer.weight.data.copy_(q)
    layer.weight_scale.data.copy_(scale)
    if layer.input_scale is not None:
        layer.input_scale.data.fill_(float(x.abs().max()) / 448)
    if plain.bias is not None and layer.bias is not None:
        plain.bias.data = torch.randn(outputs).to(dtype)
        layer.bias.data = plain.bias.data
    return plain, layer, x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_an_fp8_layer_is_within_4_percent_of_the_unquantised_one(
    static: bool, bias: bool, dtype: torch.dtype
) -> None:
    plain, layer, x = make_pair(static=static, bias=bias, dtype=dtype)
    with torch.no_grad():
        expected, found = plain(x).float(), layer(x)
    assert found.dtype is dtype
    error = (found.float() - expected).norm() / expected.norm()
    assert 0.005 < error < 0.04


def test_scales_are_applied_per_token_and_per_output_channel() -> None:
    q = torch.eye(16)[:3].to(torch.float8_e4m3fn)
    weight = torch.ones(32, 16).to(torch.float8_e4m3fn)
    tokens, channels = torch.tensor([[1.0], [2.0], [4.0]]), torch.arange(32.0)[:, None]
    kinds = {"dtype": torch.float32, "unit": torch.ones(1)}
    found = scaled_matmul(q, weight, tokens, channels, None, **kinds)
    assert torch.equal(found, tokens * channels.t())
    one = scaled_matmul(q, weight, torch.tensor([3.0]), channels, torch.ones(32), **kinds)
    assert torch.equal(one, (3 * channels.t() + 1).expand(3, 32))


def test_no_tokens_give_no_rows() -> None:
    _, layer, x = make_pair(static=False, bias=True, dtype=torch.float32)
    assert layer(x[:0]).shape == (0, 96)


@pytest.mark.parametrize(("inputs", "outputs"), [(24, 32), (32, 40)])
def test_sizes_that_the_hardware_cannot_multiply_are_refused(inputs: int, outputs: int) -> None:
    with pytest.raises(
        ModelError, match=rf"{outputs} outputs and {inputs} inputs.*multiples of 16"
    ):
        Fp8Linear(inputs, outputs, static=False)


@pytest.mark.parametrize("static", [False, True])
def test_an_fp8_layer_traces_into_one_graph_with_its_scales_as_inputs(static: bool) -> None:
    _, layer, x = make_pair(static=static, bias=True, dtype=torch.bfloat16)
    graphs = []

    def backend(module: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(module)
        return module

    torch._dynamo.reset()
    with torch.no_grad():
        found = torch.compile(layer, backend=backend, fullgraph=True)(x)
        assert torch.equal(found, layer(x))
    torch._dynamo.reset()
    (graph,) = graphs
    assert not [node for node in graph.graph.nodes if node.op == "get_attr"]
