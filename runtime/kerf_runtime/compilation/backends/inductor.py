"""Compiles one piece with Inductor: its wrapper and its kernels, each a file that needs no compiler to run.

What it takes of Inductor is named in ``compilation.internals``.  Nothing of it is imported before something is
compiled: loading a stored piece goes through ``compilation.loader``.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kerf_runtime.compilation import internals
from kerf_runtime.compilation.backends.indexing import index_for_every_step
from kerf_runtime.compilation.backends.interface import (
    CompiledArtifact,
    CompileRequest,
    PieceCall,
)
from kerf_runtime.compilation.backends.options import (
    INNER_OPTIONS,
    settings_for,
    validate_options,
)
from kerf_runtime.compilation.backends.warm_up import warm_up_program
from kerf_runtime.compilation.counters import compilation_counter, compile_gate
from kerf_runtime.compilation.launch import KernelLaunch
from kerf_runtime.compilation.loader import (
    KernelSource,
    load_wrapper,
    parse_wrapper,
)
from kerf_runtime.compilation.program import rebuild_program
from kerf_runtime.errors import CompileError, KerfError
from kerf_runtime.reasons import ConfigReason

__all__ = ["InductorBackend", "inductor_session"]

_log = logging.getLogger(__name__)


@contextmanager
def inductor_session() -> Iterator[None]:
    """A private, empty Inductor cache folder: what is compiled inside is compiled for real."""
    with (
        tempfile.TemporaryDirectory(prefix="kerf-inductor-") as folder,
        internals.temporary_cache_dir(folder),
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
    cpu_vec_isa = internals.cpu_vec_isa
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
    sources: list[str] = []
    lowering = internals.GraphLowering
    previous = lowering.save_output_code
    lowering.save_output_code = staticmethod(sources.append)
    try:
        yield sources
    finally:
        lowering.save_output_code = previous


class InductorBackend:
    """Compiles pieces with Inductor, through PyTorch's standalone compilation."""

    name = "inductor"

    def check(self, options: Mapping[str, Any]) -> None:
        """Refuse other versions of torch and unknown options."""
        internals.check_torch_version()
        validate_options(options)

    def prepare_worker(self, device: torch.device, threads: int) -> None:
        """Kernels are compiled by forked helpers; a GPU must be known before they are.

        On a GPU a small piece is compiled.  On a CPU that would take a C++ compiler for longer than it
        saves.
        """
        config = internals.inductor_config
        config.compile_threads, config.worker_start_method = threads, "fork"
        if device.type == "cuda":
            torch.cuda.init()
            module, values = rebuild_program(warm_up_program(str(device)))
            with self.session():
                self.compile(CompileRequest(module, values))

    def session(self) -> AbstractContextManager[None]:
        """A private, empty Inductor cache."""
        return inductor_session()

    def compile(self, request: CompileRequest) -> CompiledArtifact:
        """Compile one piece, for its symbolic shape or for one number of tokens.

        A static size is autotuned on a GPU: its kernels run here, on random inputs of that size.  If Inductor fails at
        that, or the loader does not know what it chose, the size gets code that is not tuned, and that is counted.

        Raises:
            CompileError: Inductor assumed something about the number of tokens, or made a wrapper that
                the loader refuses.
        """
        compile_gate.check("the compilation of a piece")
        waited = _kernel_seconds()
        values = list(request.example_values)
        settings = _settings(request, timed=request.tokens is not None)
        try:
            source = _source(request, values, settings)
            wrapper = parse_wrapper(source)
        except CompileError as error:
            if request.tokens is None or not _on_gpu(values):
                raise
            compilation_counter.untuned_compilations += 1
            _log.warning(
                "a piece for %d tokens is compiled without tuning (%s): %s",
                request.tokens,
                ConfigReason.TUNING_FAILED,
                error,
            )
            settings = _settings(request, timed=False)
            source = _source(request, values, settings)
            wrapper = parse_wrapper(source)
        if request.tokens is not None:
            compilation_counter.static_compilations += 1
        if wrapper.num_inputs != len(values):
            raise CompileError(
                f"Inductor changed the piece's inputs from {len(values)} to {wrapper.num_inputs}"
            )
        files = {"wrapper.py": source.encode()}
        with _patched(settings):  # the same flags find the same files
            for index, kernel in enumerate(wrapper.kernels):
                if kernel.language == "triton":
                    launch, cubin = _triton_kernel(kernel, source)
                    files[f"kernel_{index}.json"] = launch.to_json().encode()
                    files[f"kernel_{index}.cubin"] = cubin
                else:
                    files[f"kernel_{index}.so"] = _library(kernel.argument_types, kernel.source)
        return CompiledArtifact(files, wrapper.num_inputs, _kernel_seconds() - waited)

    def load(self, folder: Path, *, num_inputs: int, identity: str) -> PieceCall:
        try:
            wrapper = (folder / "wrapper.py").read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise CompileError(f"a piece cannot be read: {error}", where=str(folder)) from error
        kernels = sorted(
            (p for p in folder.glob("kernel_*") if p.suffix in (".so", ".cubin")),
            key=lambda p: int(p.stem.removeprefix("kernel_")),
        )
        return load_wrapper(wrapper, kernels, num_inputs=num_inputs, identity=identity)


def _patched(settings: Mapping[str, Any]) -> AbstractContextManager[None]:
    patch: AbstractContextManager[None] = internals.inductor_config.patch(dict(settings))
    return patch


def _kernel_seconds() -> float:
    """How long this process has waited for compilers of kernels, as Inductor's own clock tells."""
    seconds: Sequence[float] = internals.compilation_time_metrics.get("async_compile.wait", ())
    return sum(seconds)


def _settings(request: CompileRequest, *, timed: bool) -> dict[str, Any]:
    # Imported here: the passes import Inductor, which a warm start must not.
    from kerf_runtime.compilation.passes.manager import PassManager, inductor_options

    return settings_for(
        request.options,
        timed=timed,
        on_gpu=_on_gpu(request.example_values),
        hooks=inductor_options(PassManager(request.passes, dump_dir=request.dump)),
    )


def _source(request: CompileRequest, values: list[Any], settings: Mapping[str, Any]) -> str:
    """``_generate``, counted, with what Inductor raises made ours."""
    compilation_counter.backend_compilations += 1
    try:
        source = _generate(request, values, settings)
    except KerfError:
        raise
    except Exception as error:
        names = ", ".join(request.options)
        raise CompileError(
            f"Inductor could not compile a piece: {type(error).__name__}: {error}",
            hint=f"compilation.inductorConfig sets {names}: try without"
            if names
            else "compilation.backend eager runs the model without Inductor",
        ) from error
    compilation_counter.inductor_compilations += 1
    return source


def _generate(request: CompileRequest, values: list[Any], settings: Mapping[str, Any]) -> str:
    """The wrapper's source; its kernels are compiled and in Inductor's in-process caches."""
    from kerf_runtime.compilation.assumptions import check_assumptions

    general = request.tokens is None
    fake_mode = next(v.fake_mode for v in values if hasattr(v, "fake_mode"))
    context = internals.TracingContext(fake_mode)
    with (
        internals.tracing(context),
        _wrapper_sources() as sources,
        _patched(settings),
        index_for_every_step() if general else nullcontext(),
        torch.no_grad(),
    ):
        compiled = internals.standalone_compile(
            request.module,
            values,
            dynamic_shapes="from_tracing_context" if general else "from_example_inputs",
            options={"config_patches": INNER_OPTIONS},
        )
        if not general and _on_gpu(values):
            compiled(*[_random_like(v) for v in values])  # times the candidates, keeps the best
    if general:
        check_assumptions(fake_mode.shape_env, where="compiling a piece")
    if len(sources) != 1:
        raise CompileError(f"expected one wrapper from Inductor, got {len(sources)}")
    return sources[0]


def _on_gpu(values: Sequence[Any]) -> bool:
    return any(isinstance(value, Tensor) and value.device.type == "cuda" for value in values)


def _random_like(value: Any) -> Any:
    """A real input with the layout of a fake one; integers are zeros, valid as any index."""
    if not isinstance(value, Tensor):
        return value
    real = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    if value.dtype.is_floating_point and value.dtype.itemsize > 1:
        return real.normal_()
    return real.zero_()


def _library(argument_types: Sequence[str], source: str) -> bytes:
    """The shared object of a kernel that was just compiled (found in Inductor's in-process cache)."""
    kernel = internals.CppPythonBindingsCodeCache.load_pybinding(list(argument_types), source)
    return Path(kernel.__self__.__file__).read_bytes()


def _triton_kernel(kernel: KernelSource, wrapper: str) -> tuple[KernelLaunch, bytes]:
    """Launch data and cubin of a Triton kernel that was just compiled."""
    # The list outlives the sessions: files of earlier ones are gone.
    files = [
        (m, Path(str(m.__file__))) for m in internals.PyCodeCache.modules if hasattr(m, kernel.name)
    ]
    tuner: Any = next(
        getattr(m, kernel.name)
        for m, file in files
        if file.exists() and file.read_text() == wrapper
    )
    if not tuner.launchers:
        tuner.precompile()
    launcher = tuner.launchers[0]
    compiled = launcher.__globals__["runner"].__self__  # a statically launched kernel
    config, names = launcher.config, list(compiled.arg_names)
    constants = {name for i, name in enumerate(names) if i in compiled.full_constexprs}
    # Block sizes come from the configuration; the wrapper does not pass them.
    parameters = [name for name in names if name not in config.kwargs]
    parameters += tuner.inductor_meta.get("extra_launcher_args", [])
    grid = internals.GridExpr.from_meta(tuner.inductor_meta, config)
    launch = KernelLaunch(
        function=compiled.name,
        num_warps=compiled.num_warps,
        shared=compiled.shared,
        parameters=tuple(parameters),
        passed=tuple(name for name in names if name not in constants),
        types=compiled.arg_tys,
        scratch=int(compiled.has_global_scratch) + int(compiled.has_profile_scratch),
        prefix=tuple(grid.prefix),
        grid=(str(grid.x_grid), str(grid.y_grid), str(grid.z_grid)),
    )
    folder = Path(internals.triton_cache_dir(tuner.device_props.index))
    cubin = folder / launcher.cache_hash / f"{compiled.name}.cubin"
    return launch, cubin.read_bytes()
