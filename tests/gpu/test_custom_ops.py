"""The Triton forms of the custom operators on the GPU, compared with their native forms."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.ops.cases import EPS, Case, assert_close, cases, results
from torch.library import opcheck

pytestmark = pytest.mark.gpu

NAMES = [case.name for case in cases(1, 16, torch.float32)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ROWS = [1, 7, 64, 513]
WIDTHS = [576, 4096, 14336]
UNALIGNED = [1000, 100]
"""Widths whose rows do not all start at 16 bytes, or are no multiple of 16 elements."""


def case_of(name: str, dtype: torch.dtype, rows: int = 7, width: int = 576) -> Case:
    return next(case for case in cases(rows, width, dtype, "cuda") if case.name == name)


@pytest.mark.parametrize(
    ("dtype", "width"),
    [(dtype, width) for dtype in DTYPES for width in WIDTHS]
    + [(torch.bfloat16, width) for width in UNALIGNED],
    ids=str,
)
@pytest.mark.parametrize("name", NAMES)
def test_the_triton_form_agrees_with_the_native_form(
    name: str, dtype: torch.dtype, width: int
) -> None:
    for rows in ROWS:
        case = case_of(name, dtype, rows, width)
        assert_close(case.operator(*case.args), case.native(*case.args), dtype)


@pytest.mark.parametrize("name", NAMES)
def test_the_operator_is_registered_as_pytorch_demands_on_the_gpu(name: str) -> None:
    case = case_of(name, torch.bfloat16)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    assert set(opcheck(case.operator.default, case.args, test_utils=checks).values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_graph_replays_the_operator_on_new_values(name: str) -> None:
    case = case_of(name, torch.bfloat16, 64, 4096)
    other = next(c for c in cases(64, 4096, torch.bfloat16, "cuda", seed=1) if c.name == name)
    case.operator(*case.args)  # compiles the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = case.operator(*case.args)
    for static, new in zip(case.args, other.args, strict=True):
        if isinstance(static, torch.Tensor):
            static.copy_(new)
    graph.replay()
    for one, expected in zip(results(recorded), results(other.operator(*other.args)), strict=True):
        assert torch.equal(one.float(), expected.float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_fused_quantisation_is_the_operator_followed_by_the_quantisation(
    dtype: torch.dtype,
) -> None:
    ops = torch.ops.kerf
    x, residual, weight, _ = case_of("fused_add_rms_norm", dtype, 64, 4096).args
    normed, total = ops.fused_add_rms_norm(x, residual, weight, EPS)
    expected = (*ops.dynamic_per_token_fp8_quant(normed), total)
    fused = ops.fused_add_rms_norm_dynamic_per_token_fp8_quant(x, residual, weight, EPS)
    assert_close(fused, expected, dtype)
    gated = case_of("silu_and_mul", dtype, 64, 4096).args[0]
    assert_close(
        ops.silu_and_mul_dynamic_per_token_fp8_quant(gated),
        ops.dynamic_per_token_fp8_quant(ops.silu_and_mul(gated)),
        dtype,
    )


def test_rows_beyond_two_to_the_31_elements_are_reached() -> None:
    rows, width = 150_001, 14336
    x = torch.ones(rows, width, dtype=torch.bfloat16, device="cuda")
    q, scale = torch.ops.kerf.dynamic_per_token_fp8_quant(x)
    assert float(scale[-1]) == pytest.approx(1 / 448)
    assert bool((q[-1].float() == 448).all())


def test_no_tokens_launch_nothing() -> None:
    x = torch.empty(0, 576, dtype=torch.bfloat16, device="cuda")
    q, scale = torch.ops.kerf.dynamic_per_token_fp8_quant(x)
    assert q.shape == (0, 576)
    assert scale.shape == (0, 1)
