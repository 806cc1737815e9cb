"""What follows from the document alone, without knowing the machine.  Pure.

``resolve`` and ``key`` must agree on these: the operator computes the cache key where no machine can be
asked.  The level is a parameter because resolution may lower it.
"""

from __future__ import annotations

from kerf_runtime.config.compilation import (
    ATTENTION_OPS,
    CompilationConfig,
    CompilationLevel,
    CompilerBackendName,
)
from kerf_runtime.config.custom_ops import resolve_custom_ops
from kerf_runtime.config.deployment import ModelDeploymentSpec
from kerf_runtime.config.passes import PassConfig

__all__ = [
    "attention_is_split_out",
    "compile_sizes",
    "custom_ops",
    "default_capture_sizes",
    "inductor_compiles",
    "inductor_compiles_pieces",
    "passes",
    "requested_capture_sizes",
    "requested_compile_sizes",
    "split_out",
    "splitting_ops",
    "with_mixers",
]


def default_capture_sizes(max_num_seqs: int, max_num_batched_tokens: int) -> tuple[int, ...]:
    """1, 2, 4, then multiples of 8 up to the first one that holds ``max_num_seqs`` sequences.

    The largest size never exceeds ``max_num_batched_tokens`` and is always exactly reachable.
    """
    top = min(
        -(-max_num_seqs // 8) * 8 if max_num_seqs > 4 else max_num_seqs, max_num_batched_tokens
    )
    sizes = {size for size in (1, 2, 4, *range(8, top + 1, 8)) if size <= top}
    return tuple(sorted(sizes | {top}))


def requested_capture_sizes(spec: ModelDeploymentSpec) -> tuple[int, ...]:
    """The capture sizes as given, or the default ladder; whether graphs are on does not matter here."""
    if spec.compilation.capture_sizes is not None:
        return tuple(spec.compilation.capture_sizes)
    return default_capture_sizes(spec.engine.max_num_seqs, spec.engine.max_num_batched_tokens)


def splitting_ops(compilation: CompilationConfig) -> tuple[str, ...]:
    """The splitting ops with the default written out, without knowing the model; see ``with_mixers``."""
    ops = compilation.splitting_ops
    return ATTENTION_OPS if ops is None else tuple(ops)


def with_mixers(ops: tuple[str, ...], mixer_ops: tuple[str, ...]) -> tuple[str, ...]:
    """The splitting ops ``ops`` for a model with these state-space operators: cut out where attention is."""
    if not attention_is_split_out(ops):
        return ops
    return tuple(sorted({*ops, *(op for op in mixer_ops if not split_out(ops, (op,)))}))


def attention_is_split_out(ops: tuple[str, ...]) -> bool:
    """Whether attention is a piece of its own."""
    return split_out(ops, ATTENTION_OPS)


def split_out(ops: tuple[str, ...], wanted: tuple[str, ...]) -> bool:
    """Whether all of ``wanted`` are pieces of their own; an overload such as ``kerf::attention.default`` counts."""
    return {op.partition(".")[0] for op in ops} >= set(wanted)


def inductor_compiles(compilation: CompilationConfig, level: CompilationLevel) -> bool:
    """Whether Inductor generates any code at ``level``."""
    return (
        level is not CompilationLevel.NO_COMPILATION
        and compilation.backend is CompilerBackendName.INDUCTOR
    )


def inductor_compiles_pieces(compilation: CompilationConfig, level: CompilationLevel) -> bool:
    """Whether there are pieces for passes and static sizes to work on."""
    return level is CompilationLevel.PIECEWISE and inductor_compiles(compilation, level)


def custom_ops(compilation: CompilationConfig, level: CompilationLevel) -> tuple[str, ...]:
    """The names of the layers that run as custom operators, sorted."""
    inductor = inductor_compiles(compilation, level)
    return tuple(sorted(resolve_custom_ops(compilation.custom_ops, inductor=inductor)))


def requested_compile_sizes(spec: ModelDeploymentSpec) -> tuple[int, ...]:
    """The sizes of ``compileSizes``, ascending, once each, ``cudagraph_capture_sizes`` written out."""
    sizes: set[int] = set()
    for entry in spec.compilation.compile_sizes or ():
        sizes |= {entry} if isinstance(entry, int) else set(requested_capture_sizes(spec))
    return tuple(sorted(sizes))


def compile_sizes(spec: ModelDeploymentSpec, level: CompilationLevel) -> tuple[int, ...]:
    """The sizes that are compiled with static shapes at ``level``, in tokens."""
    if not inductor_compiles_pieces(spec.compilation, level):
        return ()
    return requested_compile_sizes(spec)


def passes(compilation: CompilationConfig, level: CompilationLevel) -> PassConfig:
    """The passes that can do anything at ``level``.

    ``noopElimination`` is on by default and changes no result, so that it is off where Inductor compiles
    no pieces is no downgrade.
    """
    if not inductor_compiles_pieces(compilation, level):
        return PassConfig.off()
    if attention_is_split_out(splitting_ops(compilation)):
        return compilation.passes.model_copy(update={"attention_quant_fusion": False})
    return compilation.passes
