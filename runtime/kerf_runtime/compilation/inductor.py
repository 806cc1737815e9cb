"""The private-API surface towards Inductor: compile one piece, collect its wrapper and kernels.

Everything that reaches into ``torch._inductor`` is in this file; it was tested with the torch versions
in ``loader.SUPPORTED_TORCH`` and refuses others.
"""

from __future__ import annotations

import difflib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx

from kerf_runtime.compilation.artifact import CompiledArtifact
from kerf_runtime.compilation.assumptions import check_assumptions
from kerf_runtime.compilation.counters import compilation_counter, compile_gate
from kerf_runtime.compilation.loader import SUPPORTED_TORCH, parse_wrapper
from kerf_runtime.errors import CompileError, ConfigError

__all__ = [
    "check_torch_version",
    "compile_piece",
    "inductor_session",
    "validate_options",
]

_DEFAULT_OPTIONS: dict[str, Any] = {
    # The number of threads must not be compiled in: pods may have other CPU limits than the Job.
    "cpp.dynamic_threads": True,
    # The instruction set is chosen in _plain_instruction_sets; probing it would start a compiler and a
    # Python that imports torch for each candidate.
    "cpp.vec_isa_ok": True,
    # Precompiled headers go to a folder shared by everything on the machine and pay off after many kernels.
    "cpp_cache_precompile_headers": False,
    # Every kernel is stored on its own; two kernels must not be merged across pieces.
    "cpp.enable_kernel_profile": False,
    # A fresh cache folder is used per session, so caching between sessions cannot help.
    "fx_graph_remote_cache": False,
}


def check_torch_version() -> None:
    """Refuse torch versions that the private-API surface was not tested with.

    Raises:
        CompileError: names the installed and the supported versions.
    """
    version = torch.__version__
    if not any(version == v or version.startswith(v + ".") for v in SUPPORTED_TORCH):
        raise CompileError(
            f"torch {version} is not supported by the piecewise compiler",
            hint=f"Install torch {' or '.join(SUPPORTED_TORCH)}, or set compilation.level to 0",
        )


def validate_options(options: Mapping[str, Any]) -> None:
    """Refuse Inductor options that do not exist.

    Raises:
        ConfigError: names the option and near matches.
    """
    from torch._inductor import config

    known = config.get_config_copy().keys()
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            raise ConfigError(
                f"Inductor has no option {name!r}",
                where="compilation.inductorConfig",
                hint=f"Did you mean {', '.join(near)}?" if near else "See torch._inductor.config",
            )


@contextmanager
def inductor_session() -> Iterator[None]:
    """A private, empty Inductor cache folder: what is compiled inside is compiled for real."""
    from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir

    with (
        tempfile.TemporaryDirectory(prefix="kerf-inductor-") as folder,
        temporary_cache_dir(folder),
        _plain_instruction_sets(),
    ):
        try:
            yield
        finally:
            _forget_modules_below(folder)


@contextmanager
def _plain_instruction_sets() -> Iterator[None]:
    """Generate for AVX512 or AVX2 without extensions such as AMX.

    The capability that torch itself reports (an observed factor) then tells exactly which machines can
    run the kernels.
    """
    from torch._inductor import cpu_vec_isa as module

    cpu_vec_isa: Any = module
    everything, probe = cpu_vec_isa.supported_vec_isa_list, cpu_vec_isa.VecISA.check_build
    plain = (cpu_vec_isa.VecAVX512, cpu_vec_isa.VecAVX2)
    cpu_vec_isa.supported_vec_isa_list = [isa for isa in everything if type(isa) in plain]
    cpu_vec_isa.VecISA.check_build = lambda self, code: False  # probes only for extensions are left
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    try:
        yield
    finally:
        cpu_vec_isa.supported_vec_isa_list, cpu_vec_isa.VecISA.check_build = everything, probe
        cpu_vec_isa.valid_vec_isa_list.cache_clear()


def _forget_modules_below(folder: str) -> None:
    """Inductor finds kernels it has loaded before in ``sys.modules``, by content: a later session that
    compiles the same kernel would be given a module whose file is gone."""
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(folder + os.sep):
            del sys.modules[name]


@contextmanager
def _wrapper_sources() -> Iterator[list[str]]:
    """Collects the source of every wrapper that Inductor generates in the block."""
    from torch._inductor.graph import GraphLowering

    sources: list[str] = []
    previous = GraphLowering.save_output_code
    GraphLowering.save_output_code = staticmethod(sources.append)
    try:
        yield sources
    finally:
        GraphLowering.save_output_code = previous


def compile_piece(
    module: fx.GraphModule, example_values: Sequence[Any], options: Mapping[str, Any]
) -> CompiledArtifact:
    """Compile one piece for its symbolic shape; call inside ``inductor_session``.

    Args:
        module: the piece; not changed.
        example_values: fake tensors and symbolic sizes, one per placeholder.
        options: Inductor options.

    Raises:
        CompileError: Inductor assumed something about the number of tokens, or made a wrapper that the
            loader refuses.
    """
    from torch._inductor import config, standalone_compile

    compile_gate.check("the compilation of a piece")
    fake_mode = next(v.fake_mode for v in example_values if hasattr(v, "fake_mode"))
    context = torch._guards.TracingContext(fake_mode)
    settings = {**_DEFAULT_OPTIONS, **options}
    compilation_counter.backend_compilations += 1
    with (
        torch._guards.tracing(context),
        _wrapper_sources() as sources,
        config.patch(settings),
        torch.no_grad(),
    ):
        standalone_compile(
            module, list(example_values), dynamic_shapes="from_tracing_context", options={}
        )
    compilation_counter.inductor_compilations += 1
    check_assumptions(fake_mode.shape_env, where="compiling a piece")
    if len(sources) != 1:
        raise CompileError(f"expected one wrapper from Inductor, got {len(sources)}")
    wrapper = parse_wrapper(sources[0])
    if wrapper.num_inputs != len(example_values):
        raise CompileError(
            f"Inductor changed the piece's inputs from {len(example_values)} to {wrapper.num_inputs}"
        )
    with config.patch(settings):  # the same flags find the same files
        libraries = tuple(_library(k.argument_types, k.source) for k in wrapper.kernels)
    return CompiledArtifact(sources[0], libraries, wrapper.num_inputs)


def _library(argument_types: Sequence[str], source: str) -> bytes:
    """The shared object of a kernel that was just compiled (found in Inductor's in-process cache)."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    kernel = CppPythonBindingsCodeCache.load_pybinding(list(argument_types), source)
    return Path(kernel.__self__.__file__).read_bytes()
