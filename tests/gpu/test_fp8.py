"""FP8 linear layers on the GPU: ``torch._scaled_mm`` against the native fallback, eager and compiled."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
if torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("FP8 matrices need compute capability 8.9 or newer", allow_module_level=True)

from kerf_runtime.layers.custom_op import apply_policy
from kerf_runtime.layers.linear import Fp8Linear, scaled_matmul
from kerf_runtime.layers.quantization import quantize_rows

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def make_layer(
    *, static: bool, bias: bool, dtype: torch.dtype, inputs: int = 576, outputs: int = 960
) -> Fp8Linear:
    torch.manual_seed(0)
    layer = Fp8Linear(inputs, outputs, bias=bias, static=static)
    q, scale = quantize_rows(torch.randn(outputs, inputs) * torch.rand(outputs, 1))
    layer.weight.data.copy_(q)
    layer.weight_scale.data.copy_(scale)
    if layer.input_scale is not None:
        layer.input_scale.data.fill_(4.5 / 448)
    if layer.bias is not None:
        layer.bias.data = torch.randn(outputs).to(dtype)
    return layer


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("static", [False, True])
def test_the_gpu_computes_what_the_fallback_computes(
    static: bool, bias: bool, dtype: torch.dtype
) -> None:
    layer = make_layer(static=static, bias=bias, dtype=dtype)
    inputs = {tokens: torch.randn(tokens, 576).to(dtype) for tokens in (1, 7, 64, 513)}
    with torch.no_grad():
        expected = {tokens: layer(x).float() for tokens, x in inputs.items()}
        layer.cuda()
        for custom in (False, True):
            apply_policy(layer, frozenset({"quant_fp8"} if custom else ()))
            for tokens, x in inputs.items():
                found = layer(x.cuda())
                assert found.dtype is dtype
                assert found.shape == (tokens, 960)
                error = (found.float().cpu() - expected[tokens]).norm() / expected[tokens].norm()
                assert error < 5e-3


def test_a_token_and_a_channel_keep_their_own_scales() -> None:
    q = torch.eye(16, device="cuda")[:3].to(torch.float8_e4m3fn)
    weight = torch.ones(32, 16, device="cuda").to(torch.float8_e4m3fn)
    tokens = torch.tensor([[1.0], [2.0], [4.0]], device="cuda")
    channels = torch.arange(32.0, device="cuda")[:, None]
    for dtype in DTYPES:
        unit = torch.ones(1, device="cuda")
        found = scaled_matmul(q, weight, tokens, channels, None, dtype=dtype, unit=unit)
        assert torch.equal(found.float(), tokens * channels.t())


@pytest.mark.parametrize("static", [False, True])
def test_a_compiled_layer_agrees_with_the_eager_one_for_any_number_of_tokens(static: bool) -> None:
    layer = make_layer(static=static, bias=True, dtype=torch.bfloat16).cuda()
    compiled = torch.compile(layer, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for tokens in (32, 7, 100):
            x = torch.randn(tokens, 576, device="cuda", dtype=torch.bfloat16)
            expected = layer(x).float()
            error = (compiled(x).float() - expected).norm() / expected.norm()
            assert error < 1e-2


@pytest.mark.parametrize("static", [False, True])
def test_a_layer_that_is_tuned_for_one_number_of_tokens_agrees_with_the_eager_one(
    static: bool,
) -> None:
    layer = make_layer(static=static, bias=True, dtype=torch.bfloat16).cuda()
    compiled = torch.compile(
        layer,
        dynamic=False,
        fullgraph=True,
        options={"max_autotune": True, "fx_graph_cache": False},
    )
    x = torch.randn(8, 576, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        expected = layer(x).float()
        assert (compiled(x).float() - expected).norm() / expected.norm() < 1e-2


def test_a_recorded_graph_replays_an_fp8_layer_on_new_values() -> None:
    layer = make_layer(static=False, bias=False, dtype=torch.bfloat16).cuda()
    apply_policy(layer, frozenset({"quant_fp8"}))
    x = torch.randn(64, 576, device="cuda", dtype=torch.bfloat16)
    new = torch.randn_like(x)
    with torch.no_grad():
        layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded = layer(x)
        x.copy_(new)
        graph.replay()
        assert torch.equal(recorded, layer(new))
