"""Everything of PyTorch that is no public interface and that the compiler needs: what to look at when torch changes.

Each name is looked up where it is when it is used, so that nothing is imported before: a warm start imports neither
Dynamo nor Inductor.  The versions are those that it was all tested with.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch

from kerf_runtime.errors import CompileError

__all__ = ["COMPILER_MODULES", "SUPPORTED_TORCH", "check_torch_version"]

SUPPORTED_TORCH = ("2.11",)
"""Every patch release of these."""

COMPILER_MODULES = (
    "torch._inductor.compile_fx",
    "torch._inductor.standalone_compile",
    "torch._inductor.codegen.cuda_combined_scheduling",
    "torch._inductor.fx_passes.joint_graph",
)
"""What a compilation imports."""

_PLACES: Mapping[str, str] = {
    # Tracing: hooks, errors, and what a trace knows.
    "BackendCompilerFailed": "torch._dynamo.exc:BackendCompilerFailed",
    "ConstantSource": "torch._dynamo.source:ConstantSource",
    "TracingContext": "torch._guards:TracingContext",
    "Unsupported": "torch._dynamo.exc:Unsupported",
    "UserError": "torch._dynamo.exc:UserError",
    "convert_frame": "torch._dynamo:convert_frame",
    "dynamo_config": "torch._dynamo:config",
    "eval_frame": "torch._C:_dynamo.eval_frame",
    "is_in_torch_dispatch_mode": "torch.utils._python_dispatch:is_in_torch_dispatch_mode",
    "mark_dynamic": "torch._dynamo:mark_dynamic",
    "reset_dynamo": "torch._dynamo:reset",
    "symbolic_convert": "torch._dynamo:symbolic_convert",
    "tracing": "torch._guards:tracing",
    "variables": "torch._dynamo:variables",
    # Fake tensors and symbolic sizes.
    "DimDynamic": "torch.fx.experimental.symbolic_shapes:DimDynamic",
    "FakeTensorMode": "torch._subclasses.fake_tensor:FakeTensorMode",
    "PythonPrinter": "torch.utils._sympy.printers:PythonPrinter",
    "ShapeEnv": "torch.fx.experimental.symbolic_shapes:ShapeEnv",
    "SymT": "torch.utils._sympy.symbol:SymT",
    "ValueRanges": "torch.utils._sympy.value_ranges:ValueRanges",
    "bound_sympy": "torch.utils._sympy.value_ranges:bound_sympy",
    "enable_python_dispatcher": "torch._dispatch.python:enable_python_dispatcher",
    "has_storage": "torch._C:_has_storage",
    "make_fx": "torch.fx.experimental.proxy_tensor:make_fx",
    "schemas": "torch._C:_jit_get_all_schemas",
    "statically_known_true": "torch.fx.experimental.symbolic_shapes:statically_known_true",
    "symbol_is_type": "torch.utils._sympy.symbol:symbol_is_type",
    # Compiling with Inductor.
    "CppPythonBindingsCodeCache": "torch._inductor.codecache:CppPythonBindingsCodeCache",
    "CustomGraphPass": "torch._inductor.custom_graph_pass:CustomGraphPass",
    "GraphLowering": "torch._inductor.graph:GraphLowering",
    "GridExpr": "torch._inductor.runtime.triton_heuristics:GridExpr",
    "PyCodeCache": "torch._inductor.codecache:PyCodeCache",
    "compilation_time_metrics": "torch._dynamo.utils:compilation_time_metrics",
    "cpu_vec_isa": "torch._inductor:cpu_vec_isa",
    "fx_graph_cse": "torch._functorch.compile_utils:fx_graph_cse",
    "inductor_compile": "torch._inductor:compile",
    "inductor_config": "torch._inductor:config",
    "joint_graph_passes": "torch._inductor.fx_passes.joint_graph:joint_graph_passes",
    "select_decomp_table": "torch._inductor.decomposition:select_decomp_table",
    "simd": "torch._inductor.codegen:simd",
    "standalone_compile": "torch._inductor:standalone_compile",
    "temporary_cache_dir": "torch._inductor.runtime.cache_dir_utils:temporary_cache_dir",
    "triton_cache_dir": "torch._inductor.runtime.cache_dir_utils:triton_cache_dir",
    "triton_utils": "torch._inductor.codegen:triton_utils",
    # Running what was compiled; the first two are there in builds for CUDA only.
    "StaticCudaLauncher": "torch._C:_StaticCudaLauncher",
    "current_raw_stream": "torch._C:_cuda_getCurrentRawStream",
    "dynamo_guards": "torch._C:_dynamo.guards",
    "scaled_mm": "torch:_scaled_mm",
}


def __getattr__(name: str) -> Any:
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, path = place.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        if not hasattr(found, part):
            try:
                importlib.import_module(f"{found.__name__}.{part}")
            except ModuleNotFoundError as error:
                # Of a build without CUDA, for example: whoever can go on without it asks with a default.
                raise AttributeError(f"torch {torch.__version__} has no {place}") from error
        found = getattr(found, part)
    return found


def check_torch_version() -> None:
    """Refuse versions of torch whose internals nobody looked at.

    Raises:
        CompileError: names the installed and the supported versions.
    """
    version = torch.__version__
    if not any(version == v or version.startswith(v + ".") for v in SUPPORTED_TORCH):
        raise CompileError(
            f"torch {version} is not supported by the compiler",
            hint=f"Install torch {' or '.join(SUPPORTED_TORCH)}, or set compilation.level to 0",
        )
