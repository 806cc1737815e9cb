"""Run an Inductor wrapper without Inductor.

An Inductor artifact is a generated Python wrapper plus compiled kernels: shared objects on the CPU,
cubins with launch data on the GPU.  The wrapper's source is parsed, its ``call`` function is kept, and
everything it may refer to is supplied from a short table here: allocation helpers of ``torch._C``,
ATen, and the kernels.  A wrapper that refers to anything else is refused: a stale or foreign artifact
must not half-run.  The device index that the wrapper was generated for is dropped; it runs on the
current device.

Nothing of Dynamo or Inductor is imported, so a warm start neither pays for their import nor can
compile.  Tested with the torch versions in ``internals``.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from kerf_runtime.compilation import internals
from kerf_runtime.compilation.internals import SUPPORTED_TORCH
from kerf_runtime.compilation.launch import load_kernel
from kerf_runtime.errors import CompileError

__all__ = ["KernelSource", "WrapperSource", "load_wrapper", "parse_wrapper"]


def _bias_addmm(
    bias: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    out: Tensor | None = None,
    alpha: float = 1,
    beta: float = 1,
) -> Tensor:
    """``addmm``; a bias that is the same in every row goes in as one row, for which there are faster kernels.

    A candidate beside ``addmm`` where products are tuned.

    Args:
        bias: [M, N]; a broadcast row has stride 0.
        first: [M, K].
        second: [K, N].
    """
    one_row = bias.size(0) == 1 or (bias.stride(0) == 0 and bias.size(0) > 0)
    added = bias[0] if one_row else bias
    result: Tensor = torch.addmm(added, first, second, out=out, alpha=alpha, beta=beta)
    return result


_EXTERN_KERNELS: dict[str, Callable[..., Any]] = {
    "mm": torch.mm,
    "mm_dtype": torch.mm,
    "addmm": torch.addmm,
    "bias_addmm": _bias_addmm,
    "bmm": torch.bmm,
    "bmm_dtype": torch.bmm,
    "baddbmm": torch.baddbmm,
    "_scaled_mm": internals.scaled_mm,
    "_mm_plus_mm": torch.ops.inductor._mm_plus_mm,  # an operator of torch itself
}
"""What Inductor chooses among where it tunes products, and what it calls where it does not."""
_BUILTINS = {"abs", "bool", "float", "int", "len", "max", "min", "range", "round", "tuple"}
"""What a wrapper computes sizes with; whatever can reach outside of it is not among them."""
_IGNORED_NAMES = {
    "get_args",
    "benchmark_compiled_module",
    "async_compile",
    "runner",
    "call",
    "recursively_apply_fns",
}


_DEVICE_GUARD = "torch.cuda._DeviceGuard("
_SET_DEVICE = "torch.cuda.set_device("
_STREAM = "get_raw_stream("


@dataclass(frozen=True)
class KernelSource:
    """One kernel of a wrapper: the name it is bound to, its language and source.

    ``argument_types`` are those of a C++ kernel; a Triton kernel (``language`` "triton") has them in its
    launch data.
    """

    name: str
    language: str
    argument_types: tuple[str, ...]
    source: str

    @property
    def suffix(self) -> str:
        """Of the file that holds the compiled kernel."""
        return ".cubin" if self.language == "triton" else ".so"


class _Run:
    """A Triton kernel as wrappers call it: ``name.run(..., stream=...)``."""

    def __init__(self, run: Callable[..., None]) -> None:
        self.run = run


@dataclass(frozen=True)
class WrapperSource:
    """A parsed wrapper: its kernels and the code of its ``call`` function."""

    kernels: tuple[KernelSource, ...]
    code: CodeType
    num_inputs: int


class _ExternKernels:
    """The extern-kernel table as the attribute namespace that wrappers expect."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(name)


def _namespace() -> dict[str, Any]:
    guards = internals.dynamo_guards
    extern = _ExternKernels()
    for name, function in _EXTERN_KERNELS.items():
        setattr(extern, name, function)
    return {
        "torch": torch,
        "math": math,
        "inf": math.inf,
        "nan": math.nan,
        "aten": torch.ops.aten,
        "device": torch.device,
        "empty_strided": torch.empty_strided,
        "extern_kernels": extern,
        "assert_size_stride": guards.assert_size_stride,
        "assert_alignment": guards.assert_alignment,
        "empty_strided_cpu": guards._empty_strided_cpu,
        "empty_strided_cuda": guards._empty_strided_cuda,
        "get_raw_stream": _current_raw_stream,
        "reinterpret_tensor": guards._reinterpret_tensor,
    }


_raw_stream = getattr(internals, "current_raw_stream", None)


def _current_raw_stream(_index: int) -> int:
    """The current stream of the current device, whatever device the wrapper was generated for."""
    assert _raw_stream is not None  # what calls it was compiled for a GPU
    stream: int = _raw_stream(torch.cuda.current_device())
    return stream


def _refuse(what: str) -> CompileError:
    return CompileError(
        f"the compiled artifact contains {what}, which the loader does not know",
        hint=f"The loader was tested with torch {', '.join(SUPPORTED_TORCH)}; this is {torch.__version__}",
    )


def parse_wrapper(source: str) -> WrapperSource:
    """Check a wrapper and extract what is needed to run it.

    Raises:
        CompileError: the wrapper contains something unknown; names it.
    """
    try:
        return _parse(ast.parse(source))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        # ValueError: null bytes, or a kernel whose source is no literal.
        raise _refuse(f"text that is no wrapper ({error})") from error


def _parse(tree: ast.Module) -> WrapperSource:
    kernels: list[KernelSource] = []
    function: ast.FunctionDef | None = None
    known = _namespace()
    for statement in tree.body:
        if isinstance(statement, (ast.Import, ast.ImportFrom, ast.Delete, ast.If)):
            continue
        if isinstance(statement, ast.Expr):
            continue  # docstring, async_compile.wait(...)
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
            kernel = _kernel(name, statement.value)
            if kernel is not None:
                kernels.append(kernel)
            continue  # an alias: refused below if ``call`` uses it and the table lacks it
        if isinstance(statement, ast.ClassDef) and statement.name == "Runner":
            methods = [s for s in statement.body if isinstance(s, ast.FunctionDef)]
            function = next((s for s in methods if s.name == "call"), None)
            continue
        if isinstance(statement, ast.FunctionDef) and statement.name in _IGNORED_NAMES:
            continue
        raise _refuse(f"the statement {ast.unparse(statement)[:80]!r}")
    if function is None or [arg.arg for arg in function.args.args] != ["self", "args"]:
        raise _refuse("no Runner.call(self, args)")
    _check_names(function, known.keys() | {kernel.name for kernel in kernels})
    function.args.args = function.args.args[1:]
    function.body = _on_current_device(function.body)
    module = ast.fix_missing_locations(ast.Module(body=[function], type_ignores=[]))
    return WrapperSource(
        tuple(kernels), compile(module, "<kerf piece>", "exec"), _num_inputs(function)
    )


def _kernel(name: str, value: ast.expr) -> KernelSource | None:
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return None
    called = ast.unparse(value.func)
    if not called.startswith("async_compile."):
        return None
    if called == "async_compile.triton":
        own_name, source = (ast.literal_eval(arg) for arg in value.args[:2])
        if own_name != name:
            raise _refuse(f"the kernel {own_name!r} under the name {name!r}")
        return KernelSource(name, "triton", (), source)
    if called != "async_compile.cpp_pybinding":
        raise _refuse(f"a kernel made by {called}")
    types, source = (ast.literal_eval(arg) for arg in value.args[:2])
    return KernelSource(name, "cpp", tuple(types), source)


def _on_current_device(statements: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Without device guards, and with one question for the stream instead of one per kernel."""
    kept: list[ast.stmt] = []
    streams: set[str] = set()
    for statement in statements:
        if isinstance(statement, ast.With):
            guards = [ast.unparse(item.context_expr) for item in statement.items]
            if any(not guard.startswith(_DEVICE_GUARD) for guard in guards):
                raise _refuse(f"the statement {ast.unparse(statement)[:80]!r}")
            kept += _on_current_device(statement.body)
            continue
        text = ast.unparse(statement)
        if text.startswith(_SET_DEVICE):
            continue
        if isinstance(statement, ast.Assign) and ast.unparse(statement.value).startswith(_STREAM):
            if text in streams:
                continue
            streams.add(text)
        kept.append(statement)
    return kept


def _check_names(function: ast.FunctionDef, known: set[str]) -> None:
    stored = {
        n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            if node.id not in known | stored | _BUILTINS | {"args"}:
                raise _refuse(f"the name {node.id!r}")
            if node.id == "self":
                raise _refuse("partitions")
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "extern_kernels"
            and node.attr not in _EXTERN_KERNELS
        ):
            raise _refuse(f"the extern kernel {node.attr!r}")


def _num_inputs(function: ast.FunctionDef) -> int:
    first = function.body[0]
    if isinstance(first, ast.Assign) and isinstance(first.targets[0], ast.Tuple):
        return len(first.targets[0].elts)
    raise _refuse("a call function that does not begin with unpacking its arguments")


def load_wrapper(
    source: str, libraries: Sequence[Path], *, num_inputs: int, identity: str
) -> Callable[[list[Any]], Sequence[Any]]:
    """The ``call`` function of a wrapper: takes the list of inputs (and empties it), returns outputs.

    Args:
        source: the wrapper.
        libraries: shared object or cubin of each kernel, in the order of
            ``parse_wrapper(source).kernels``.
        num_inputs: how many inputs the piece has; anything else is refused.
        identity: unique name of the artifact, used for the names of the loaded modules.

    Raises:
        CompileError: the wrapper or a library is not what was expected.
    """
    wrapper = parse_wrapper(source)
    if wrapper.num_inputs != num_inputs:
        raise _refuse(f"{wrapper.num_inputs} inputs instead of {num_inputs}")
    if len(libraries) != len(wrapper.kernels):
        raise _refuse(f"{len(wrapper.kernels)} kernels but {len(libraries)} libraries")
    namespace = _namespace()
    for index, (kernel, path) in enumerate(zip(wrapper.kernels, libraries, strict=True)):
        if path.suffix != kernel.suffix:
            raise _refuse(f"the file {path.name} for a kernel in {kernel.language}")
        if kernel.language == "triton":
            namespace[kernel.name] = _Run(load_kernel(path))
        else:
            namespace[kernel.name] = _load_library(path, f"kerf_{identity}_{index}.kernel")
    exec(wrapper.code, namespace)
    call: Callable[[list[Any]], Sequence[Any]] = namespace["call"]
    return call


def _load_library(path: Path, module_name: str) -> Callable[..., None]:
    # The kernel's init function reads the address of torch's data-pointer accessor from here.
    guards = internals.dynamo_guards
    address = guards._torchinductor_pyobject_tensor_data_ptr
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(address)
    loader = importlib.machinery.ExtensionFileLoader(module_name, str(path))
    spec = importlib.util.spec_from_file_location(module_name, path, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise CompileError(f"cannot load the kernel: {error}", where=str(path)) from error
    kernel: Callable[..., None] = module.kernel
    return kernel
