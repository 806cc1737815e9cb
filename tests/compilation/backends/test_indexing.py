"""32 bits index what they reach at every step there can be; 64 bits index the rest, and no guard is left."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import sympy
from tests.compilation.backends.fake_gpu import gated_wrapper

from kerf_runtime.compilation.assumptions import check_assumptions
from kerf_runtime.compilation.backends import inductor
from kerf_runtime.compilation.backends.indexing import index_for_every_step, most
from kerf_runtime.errors import CompileError

LLAMA_8B, QWEN_7B, LLAMA_70B = 2 * 14336, 2 * 18944, 2 * 28672
"""Columns of the gate and up projections together; 65536 rows of them are below, above, above 2**31."""

TOKENS = sympy.Symbol("s0", integer=True, positive=True)


def test_a_size_is_as_large_as_the_largest_step_makes_it():
    assert most(LLAMA_8B * TOKENS) == LLAMA_8B * 65536
    assert most(sympy.Max(TOKENS, 7) + 1) == 65537
    assert most(12) == 12


@pytest.mark.parametrize(
    ("columns", "narrow"), [(LLAMA_8B, True), (QWEN_7B, False), (LLAMA_70B, False)]
)
def test_the_decision_holds_for_the_largest_step_whatever_the_example_is(
    columns, narrow, monkeypatch
):
    from torch._inductor.codegen import simd, triton_utils

    # What torch says of the example: 32 rows always fit.
    monkeypatch.setattr(simd, "expr_fits_within_32bit", lambda expression: True)
    with index_for_every_step():
        for module in (simd, triton_utils):
            assert module.expr_fits_within_32bit(columns * TOKENS) is narrow
    assert simd.expr_fits_within_32bit(columns * TOKENS)


def test_what_torch_finds_too_large_stays_too_large(monkeypatch):
    from torch._inductor.codegen import simd

    monkeypatch.setattr(simd, "expr_fits_within_32bit", lambda expression: False)
    with index_for_every_step():
        assert not simd.expr_fits_within_32bit(TOKENS)


def test_kernels_of_a_model_that_fits_keep_32_bits_and_are_what_torch_makes(monkeypatch):
    wrapper, environment = gated_wrapper(LLAMA_8B)
    assert "'xnumel': 'i32'" in wrapper
    assert "tl.int64" not in wrapper
    check_assumptions(environment, where="here")
    monkeypatch.setattr(inductor, "index_for_every_step", nullcontext)
    assert _without_names(gated_wrapper(LLAMA_8B)[0]) == _without_names(wrapper)


@pytest.mark.parametrize("columns", [QWEN_7B, LLAMA_70B])
def test_kernels_of_a_model_that_does_not_fit_index_with_64_bits_without_a_guard(columns):
    wrapper, environment = gated_wrapper(columns)
    assert "tl.program_id(0).to(tl.int64)" in wrapper
    assert not any("2147483647" in str(guard.expr) for guard in environment.guards)


def test_an_indexing_guard_is_no_fault_of_the_forward(monkeypatch):
    monkeypatch.setattr(inductor, "index_for_every_step", nullcontext)
    with pytest.raises(CompileError, match=r"counts elements with 32 bits, .*57344\*s") as raised:
        gated_wrapper(LLAMA_70B)
    assert "branch" not in raised.value.hint
    assert "not the model's fault" in raised.value.hint


def test_another_guard_is_still_told_as_what_it_is():
    guard = SimpleNamespace(
        expr=sympy.Le(TOKENS, 100), sloc=SimpleNamespace(maybe_user_loc="model.py:7")
    )
    environment = SimpleNamespace(guards=[guard], var_to_range={})
    with pytest.raises(CompileError, match="depends on the number of tokens") as raised:
        check_assumptions(environment, where="Model.forward")
    assert raised.value.where == "Model.forward: model.py:7"


def _without_names(wrapper):
    """The code alone: comments hold paths and names that differ from run to run."""
    return [line for line in wrapper.splitlines() if not line.startswith("#")]
