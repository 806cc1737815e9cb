"""Code for an H200 on a machine without one: Inductor generates it, Triton does not compile it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from kerf_runtime.compilation.backends import CompileRequest, inductor
from kerf_runtime.compilation.program import InputLayout, PieceProgram, rebuild_program

_H200 = SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="H200", warp_size=32)
_SOURCE = """\
def forward(self, n, x):
    gate, up = x[:, :{half}], x[:, {half}:]
    return (torch.nn.functional.silu(gate) * up,)
"""


@contextmanager
def fake_gpu() -> Iterator[None]:
    """Inductor finds an H200; its kernels are not compiled."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.runtime.hints import DeviceProperties

    properties = DeviceProperties(
        type="cuda",
        index=0,
        multi_processor_count=132,
        cc=90,
        major=9,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
    )
    patches = (
        mock.patch.object(DeviceProperties, "create", return_value=properties),
        mock.patch.object(AsyncCompile, "triton", return_value=None),
        mock.patch("torch.cuda.get_device_properties", return_value=_H200),
        mock.patch("torch._inductor.scheduler.has_triton", return_value=True),
        mock.patch("torch.utils._triton.triton_hash_with_backend", return_value="none"),
        inductor.inductor_session(),
    )
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def gated_wrapper(columns: int, settings: Mapping[str, Any] | None = None) -> tuple[str, Any]:
    """The wrapper of SiLU-and-mul over ``[tokens, columns]``, and its shape environment.

    Args:
        columns: of gate and up together.
        settings: options of Inductor.
    """
    layouts = (
        InputLayout(("n",)),
        InputLayout(("n", str(columns)), (str(columns), "1"), "float32", "cuda:0"),
    )
    module, values = rebuild_program(PieceProgram(_SOURCE.format(half=columns // 2), layouts))
    with fake_gpu():
        source = inductor._generate(CompileRequest(module, values), values, settings or {})
    return source, values[1].fake_mode.shape_env
