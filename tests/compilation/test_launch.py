"""Launch data of a Triton kernel: read back as written, and nothing but arithmetic in it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from kerf_runtime.compilation.launch import KernelLaunch, load_kernel
from kerf_runtime.errors import CompileError

LAUNCH = KernelLaunch(
    function="triton_poi_fused_0",
    num_warps=4,
    shared=64,
    parameters=("in_ptr0", "out_ptr0", "ks0", "xnumel"),
    passed=("in_ptr0", "out_ptr0", "xnumel"),
    types="OOi",
    scratch=2,
    prefix=("rows_ = -((xnumel) // -(1024))",),
    grid=("rows_", "max(1, ks0)", "1"),
)


def test_it_is_read_back_as_it_was_written():
    assert KernelLaunch.from_json(LAUNCH.to_json()) == LAUNCH


def test_the_launch_computes_the_grid_and_passes_what_the_kernel_takes():
    calls = []
    scope = {"launch": lambda *args: calls.append(args), "function": 7}
    exec(LAUNCH.source(), scope)
    scope["run"]("in", "out", 3, 2049, stream=11)
    assert calls == [(7, 3, 3, 1, 4, 64, "OOiOO", ("in", "out", 2049, None, None), 11)]


@pytest.mark.parametrize(
    "change",
    [
        {"function": "a b"},
        {"parameters": ["in_ptr0", "out ptr0", "ks0", "xnumel"]},
        {"types": "OO"},
        {"types": "OOz"},
        {"passed": ["in_ptr0", "out_ptr0", "other"]},
        {"num_warps": "4); import os; print("},
        {"shared": None},
        {"grid": ["__import__('os').getpid()", "1", "1"]},
        {"grid": ["xnumel.real", "1", "1"]},
        {"grid": ["open('x')", "1", "1"]},
        {"grid": ["xnumel", "unknown", "1"]},
        {"grid": ["1"]},
        {"grid": ["1.5", "1", "1"]},
        {"grid": ["[1 for _ in (1,)]", "1", "1"]},
        {"prefix": ["import os"]},
        {"prefix": ["rows_ = exec('1')"]},
        {"prefix": ["a.b = 1"]},
        {"prefix": ["rows_ = ("]},
        {"prefix": ["rows_ = " + "-" * 100000 + "1"]},
        {"grid": ["for", "1", "1"]},
        {"parameters": ["in_ptr0", "out_ptr0", "for", "xnumel"], "grid": ["1", "1", "1"]},
    ],
    ids=lambda change: str(change)[:60],
)
def test_launch_data_that_is_more_than_a_launch_is_refused(tmp_path, change):
    cubin = tmp_path / "kernel_0.cubin"
    cubin.write_bytes(b"")
    data = {**json.loads(LAUNCH.to_json()), **change}
    cubin.with_suffix(".json").write_text(json.dumps(data))
    with pytest.raises(CompileError, match="launch data of a kernel cannot be read") as raised:
        load_kernel(cubin)
    assert raised.value.where == str(cubin)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "\0", "null", "[" * 100000], ids=lambda text: text[:4]
)
def test_launch_data_that_is_no_document_is_refused(tmp_path, text):
    cubin = tmp_path / "kernel_0.cubin"
    cubin.with_suffix(".json").write_text(text)
    with pytest.raises(CompileError, match="cannot be read"):
        load_kernel(cubin)


def test_missing_launch_data_is_an_error_that_names_the_kernel(tmp_path):
    with pytest.raises(CompileError, match="cannot be read") as raised:
        load_kernel(tmp_path / "kernel_3.cubin")
    assert "kernel_3.cubin" in str(raised.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_cuda_kernel_without_a_gpu_is_an_error(tmp_path):
    cubin = tmp_path / "kernel_0.cubin"
    cubin.with_suffix(".json").write_text(replace(LAUNCH, scratch=0).to_json())
    with pytest.raises(CompileError, match="without a CUDA device"):
        load_kernel(cubin)
