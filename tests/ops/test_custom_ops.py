"""Every custom operator: its native form is its CPU form, its fake tells the truth, its Triton form agrees."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.ops.cases import EPS, Case, cases, results
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.library import opcheck

from kerf_runtime.ops.fp8 import FP8_MAX, SMALLEST_SCALE

ROOT = Path(__file__).parents[2]
NAMES = [case.name for case in cases(1, 16, torch.float32)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def case_of(name: str, dtype: torch.dtype = torch.float32, rows: int = 7, width: int = 64) -> Case:
    return next(case for case in cases(rows, width, dtype) if case.name == name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_operator_on_the_cpu_is_its_native_form(name: str, dtype: torch.dtype) -> None:
    case = case_of(name, dtype)
    found, expected = results(case.operator(*case.args)), results(case.native(*case.args))
    for one, other in zip(found, expected, strict=True):
        assert one.is_contiguous()
        assert torch.equal(one.view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_operator_is_registered_as_pytorch_demands(name: str, dtype: torch.dtype) -> None:
    """Schema (no hidden mutation, no alias), autograd, and the fake form with fixed and symbolic sizes."""
    case = case_of(name, dtype)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    assert set(opcheck(case.operator.default, case.args, test_utils=checks).values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", NAMES)
def test_the_fake_form_keeps_a_symbolic_number_of_tokens(name: str) -> None:
    case = case_of(name)
    mode = FakeTensorMode(shape_env=ShapeEnv())

    def fake(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        sizes = [DimDynamic.STATIC] * value.dim()
        if value.shape[0] == 7:
            sizes[0] = DimDynamic.DYNAMIC
        return mode.from_tensor(
            value.contiguous(), symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes)
        )

    args = [fake(value) for value in case.args]
    with mode:
        found = results(case.operator(*args))
    for one, other in zip(found, results(case.native(*case.args)), strict=True):
        assert isinstance(one.shape[0], torch.SymInt)
        assert one.shape[1:] == other.shape[1:]
        assert one.dtype == other.dtype
        assert one.is_contiguous()


def test_importing_and_running_the_operators_on_the_cpu_imports_no_triton() -> None:
    code = (
        "import sys, torch\n"
        "from tests.ops.cases import cases\n"
        "for case in cases(2, 16, torch.float32): case.operator(*case.args)\n"
        "print([name for name in sys.modules if name.split('.')[0] == 'triton'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    """What Triton's interpreter says about each kernel, shape and data type."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.interpreted"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_triton_form_agrees_with_the_native_form(
    interpreted: dict[str, str], name: str, dtype: torch.dtype
) -> None:
    ending = str(dtype).removeprefix("torch.")
    mine = {k: v for k, v in interpreted.items() if k.split()[0] == name and k.endswith(ending)}
    assert len(mine) >= 5
    assert {k: v for k, v in mine.items() if v} == {}


def test_triton_agrees_on_zeros_huge_values_and_not_a_number(interpreted: dict[str, str]) -> None:
    special = {k: v for k, v in interpreted.items() if k.startswith("special")}
    assert len(special) >= 5
    assert {k: v for k, v in special.items() if v} == {}


def test_a_static_scale_saturates_and_keeps_what_is_not_a_number() -> None:
    x = torch.tensor([[0.0, 1.0, -1.0, 1e6, -1e6, math.inf, math.nan]])
    q = torch.ops.kerf.static_scaled_fp8_quant(x, torch.tensor([0.5])).float()
    assert q[0, :6].tolist() == [0.0, 2.0, -2.0, FP8_MAX, -FP8_MAX, FP8_MAX]
    assert q[0, 6].isnan()


def test_a_dynamic_scale_maps_the_largest_magnitude_of_each_row_to_the_largest_fp8_value() -> None:
    x = torch.tensor([[1.0, -8.0, 2.0], [0.0, 0.0, 0.0], [1e-3, 2e-3, 0.0]])
    q, scale = torch.ops.kerf.dynamic_per_token_fp8_quant(x)
    assert q.float().abs().amax(-1).tolist() == [FP8_MAX, 0.0, FP8_MAX]
    torch.testing.assert_close(scale[:, 0], torch.tensor([8 / 448, SMALLEST_SCALE, 2e-3 / 448]))
    torch.testing.assert_close(q.float() * scale, x, rtol=2**-4, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_fused_quantisation_is_the_norm_followed_by_the_quantisation(dtype: torch.dtype) -> None:
    ops = torch.ops.kerf
    x, residual, weight, _ = case_of("fused_add_rms_norm", dtype).args
    normed, total = ops.fused_add_rms_norm(x, residual, weight, EPS)
    q, scale = ops.dynamic_per_token_fp8_quant(normed)
    fused = ops.fused_add_rms_norm_dynamic_per_token_fp8_quant(x, residual, weight, EPS)
    for one, other in zip(fused, (q, scale, total), strict=True):
        assert torch.equal(one.float(), other.float())


def test_tensors_that_do_not_fit_are_refused() -> None:
    ops, x = torch.ops.kerf, torch.randn(2, 8)
    with pytest.raises(RuntimeError, match=r"weight \[4\] does not fit x \[2, 8\]"):
        ops.rms_norm(x, torch.ones(4), EPS)
    with pytest.raises(RuntimeError, match="must share one data type"):
        ops.rms_norm(x, torch.ones(8, dtype=torch.bfloat16), EPS)
    with pytest.raises(RuntimeError, match="scale must be one float32 value"):
        ops.static_scaled_fp8_quant(x, torch.ones(2))
    with pytest.raises(RuntimeError, match="gate and up"):
        ops.silu_and_mul(torch.randn(2, 7))
    with pytest.raises(RuntimeError, match="do not fit x"):
        ops.rotary_embedding(torch.randn(2, 1, 8), torch.randn(2, 1, 8), torch.randn(2, 1, 8))


@pytest.mark.parametrize("name", NAMES)
def test_no_tokens_give_no_results(name: str) -> None:
    case = case_of(name, rows=1)
    args = [a[:0] if isinstance(a, torch.Tensor) and a.dim() > 1 else a for a in case.args]
    assert all(one.shape[0] == 0 for one in results(case.operator(*args)))
