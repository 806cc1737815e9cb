"""Runs the Triton kernels on the CPU through Triton's interpreter and compares them with the native forms.

A program of its own (``python -m tests.ops.interpreted``): the interpreter is chosen when Triton is first
imported, and other tests need the compiler.  Prints a JSON object: what is compared -> "" or what differs.

Triton 3.6's interpreter truncates on the way to bfloat16 and drops the carry on the way to FP8, where the
hardware rounds to nearest even.  Its conversion is replaced by PyTorch's, so that the kernels are compared
and not the interpreter.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import replace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from tests.ops.cases import EPS, Case, assert_close, cases
from triton.runtime import interpreter

from kerf_runtime.ops import norm

SHAPES = ((1, 16), (7, 576), (3, 1000), (2, 4096), (64, 32))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_TORCH = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
}
_BITS: dict[int, Any] = {8: np.uint8, 16: np.uint16, 32: np.uint32}


def _convert(values: np.ndarray, source: tl.dtype, target: tl.dtype, _mode: object) -> np.ndarray:
    bits = torch.from_numpy(np.ascontiguousarray(values).view(_BITS[source.primitive_bitwidth]))
    converted = bits.view(_TORCH[source.name]).to(_TORCH[target.name])
    raw = {8: torch.uint8, 16: torch.uint16, 32: torch.uint32}[target.primitive_bitwidth]
    return converted.view(raw).numpy()


def compare(case: Case, dtype: torch.dtype) -> str:
    """Nothing, or how the Triton form differs."""
    module = importlib.import_module(f"kerf_runtime.ops.triton.{case.triton_module}")
    try:
        assert_close(getattr(module, case.name)(*case.args), case.native(*case.args), dtype)
    except AssertionError as error:
        return str(error)
    return ""


def label(name: str, rows: int, width: int, dtype: torch.dtype) -> str:
    return f"{name} {rows}x{width} {str(dtype).removeprefix('torch.')}"


def special() -> dict[str, str]:
    """Rows of zeros, values beyond FP8, infinities and what is no number; no rows at all."""
    x = torch.zeros(4, 32)
    x[1, 3], x[2, 5], x[3, 7] = 1e9, float("inf"), float("nan")
    quantised = [c for c in cases(4, 32, torch.float32) if "quant" in c.name]
    found = {}
    for case in quantised:
        # Whether a value that is no number takes the scale of its row along is left open.
        rows = x[:2] if "dynamic" in case.name else x
        first = torch.cat((rows, torch.ones_like(rows)), 1) if "silu" in case.name else rows
        residual = (case.args[1][: len(rows)],) if "add" in case.name else ()
        replaced = replace(case, args=(first, *residual, *case.args[1 + len(residual) :]))
        found[f"special {case.name}"] = compare(replaced, torch.float32)
    empty = Case("rms_norm", "norm", norm.rms_norm_native, (x[:0], torch.ones(32), EPS))
    return {**found, "special no rows": compare(empty, torch.float32)}


def main() -> None:
    interpreter._convert_float = _convert
    found = {
        label(case.name, rows, width, dtype): compare(case, dtype)
        for dtype in DTYPES
        for rows, width in SHAPES
        for case in cases(rows, width, dtype)
    }
    found |= special()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
