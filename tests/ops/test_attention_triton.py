"""The Triton kernels of attention, run by Triton's interpreter on the CPU.

Whether a kernel is interpreted is decided when triton is imported, so the cases run in a process of
their own; a failure there is a failure here, with its output.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent


def test_every_case_agrees_with_the_reference_under_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.interpret_attention"],
        cwd=HERE.parents[1],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert int(done.stdout.split()[-2]) >= 26, done.stdout


def test_attention_on_the_cpu_does_not_import_triton() -> None:
    code = (
        "import sys, torch, kerf_runtime.ops.attention as a\n"
        "from kerf_runtime.forward_context import *\n"
        "q = torch.zeros(1, 2, 8)\n"
        "with set_forward_context(ForwardContext()):\n"
        "    torch.ops.kerf.attention(q, q, q, torch.empty_like(q), 'layer')\n"
        "assert 'triton' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=HERE.parents[1])
