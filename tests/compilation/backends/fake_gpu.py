"""Code for an H200 on a machine without one: Inductor generates it, Triton does not compile it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch import fx

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
        # Or what follows would depend on whether Inductor's helpers have started yet.
        mock.patch.object(AsyncCompile, "use_process_pool", return_value=False),
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


def tuned_wrapper(module: fx.GraphModule, values: Sequence[Any], fastest: str) -> str:
    """The wrapper of a piece of a static size.

    Args:
        module: the piece.
        values: fake tensors on the device ``cuda``.
        fastest: how the name of the product begins that wins; what could be fused with it is not.
    """
    from torch._inductor import select_algorithm
    from torch._inductor.scheduler import Scheduler

    def times(_: Any, *args: Any, **__: Any) -> dict[Any, float]:
        choices = args[5]
        assert any(choice.name.startswith(fastest) for choice in choices)
        return {choice: 1.0 + (not choice.name.startswith(fastest)) for choice in choices}

    cache = select_algorithm.AlgorithmSelectorCache
    patches = (
        mock.patch("torch._inductor.compile_fx._check_triton_bf16_support"),
        mock.patch("torch._inductor.utils.is_big_gpu", return_value=True),
        mock.patch.object(cache, "make_precompile_fn", return_value=dict),
        mock.patch.object(cache, "do_autotuning", times),
        mock.patch.object(Scheduler, "benchmark_codegened_module", return_value=(9.0, "")),
        mock.patch.object(Scheduler, "benchmark_fused_nodes", return_value=(1.0, "")),
        mock.patch.object(inductor, "_random_like", lambda value: value),
        mock.patch("torch._inductor.standalone_compile.CacheCompiledArtifact.__call__"),
        fake_gpu(),
    )
    request = CompileRequest(module, list(values), tokens=8)
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        return inductor._generate(request, list(values), inductor._settings(request, timed=True))
