"""From the requested to the effective configuration, with a reason for every difference.  Pure.

``resolve`` is the only place where a mode, a level or a size is changed.  The result travels to the
log, ``/debug/graphs``, the ``kerf_effective_config_info`` metric and ``status.graphs``.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from typing import Any

from kerf_runtime.config import declared
from kerf_runtime.config.compilation import (
    ATTENTION_OPS,
    CaptureMode,
    CompilationConfig,
    CompilationLevel,
    CompilerBackendName,
    CUDAGraphMode,
)
from kerf_runtime.config.deployment import LoadFormat, ModelDeploymentSpec
from kerf_runtime.config.engine import DType, Quantization
from kerf_runtime.config.passes import FUSION_PASSES, PassConfig
from kerf_runtime.config.tuning import tuning_warnings
from kerf_runtime.errors import ConfigError
from kerf_runtime.reasons import ConfigReason, ReasonedChange

__all__ = [
    "AttentionGraphSupport",
    "EffectiveConfig",
    "PlatformFacts",
    "refuse",
    "resolve",
    "with_graphs",
]

NO_GRAPHS = "none"
"""``PlatformFacts.graph_backend`` of a platform that cannot record graphs."""


class AttentionGraphSupport(IntEnum):
    """Which batches an implementation of attention, or of a state-space mixer, can have inside a full graph."""

    NEVER = 0
    SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


@dataclass(frozen=True)
class PlatformFacts:
    """What resolution must know about the machine; made by ``kerf_runtime.platforms``.

    Attributes:
        graph_backend: how graphs are recorded; ``none`` where they cannot be.
        mixer_graph_support: what the mixer of state-space layers can have in a graph.
    """

    name: str
    graph_backend: str
    attention_backend: str
    attention_graph_support: AttentionGraphSupport
    default_dtype: DType
    mixer_graph_support: AttentionGraphSupport = AttentionGraphSupport.NEVER


@dataclass(frozen=True)
class EffectiveConfig:
    """What is in force, beside what was asked for.

    Attributes:
        custom_ops: names of the layers that run as custom operators, sorted.
        compile_sizes: tokens of the static compilations, ascending; empty where no pieces are compiled.
        graph_memory_budget: most bytes of all graphs; None without a limit.
        capture_delay_milliseconds: most that a progressive capture may delay a step.
        prefix_caching: whether requests that begin alike share what was computed.
        passes: the passes that run; all off where Inductor compiles no pieces.
        changes: every difference, in the order in which it was decided.
        warnings: what is in force as asked and may still not do what was hoped for.
    """

    requested_level: CompilationLevel
    level: CompilationLevel
    requested_mode: CUDAGraphMode
    mode: CUDAGraphMode
    capture_sizes: tuple[int, ...]
    graph_memory_budget: int | None
    capture_mode: CaptureMode
    capture_delay_milliseconds: int
    splitting_ops: tuple[str, ...]
    dtype: DType
    max_model_len: int
    platform: PlatformFacts
    backend: CompilerBackendName
    custom_ops: tuple[str, ...]
    compile_sizes: tuple[int, ...]
    passes: PassConfig
    cudagraph_copy_inputs: bool
    quantization: Quantization | None
    load_format: LoadFormat
    prefix_caching: bool
    changes: tuple[ReasonedChange, ...]
    warnings: tuple[ReasonedChange, ...]

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready description for ``/debug/graphs``."""
        data = asdict(self)
        data["level"], data["requested_level"] = int(self.level), int(self.requested_level)
        data["passes"] = self.passes.to_document()
        return data


def resolve(
    spec: ModelDeploymentSpec,
    *,
    platform: PlatformFacts,
    model_max_len: int,
    model_dtype: DType,
    mixer_ops: tuple[str, ...] = (),
) -> EffectiveConfig:
    """The effective configuration of ``spec`` on ``platform``.

    Args:
        spec: the requested configuration.
        platform: facts about the machine.
        model_max_len: the longest sequence the checkpoint supports, in tokens.
        model_dtype: the checkpoint's own data type.
        mixer_ops: operators of the model's state-space layers, if it has any.

    Raises:
        ConfigError: contradictory, impossible, or a downgrade under ``strict``.
    """
    compilation, engine = spec.compilation, spec.engine
    level, changes = _level(spec)
    splitting = declared.with_mixers(declared.splitting_ops(compilation), mixer_ops)
    mode, lowered = _mode(spec, level, splitting, platform, mixer_ops)
    changes += lowered
    prefix_caching = engine.prefix_caching and not mixer_ops
    if prefix_caching is not engine.prefix_caching:
        changes.append(
            ReasonedChange(
                "prefixCaching",
                "true",
                "false",
                ConfigReason.STATE_SPACE_LAYERS,
                "the model has state-space layers, which keep the end of a text and not its parts",
            )
        )
    passes = declared.passes(compilation, level)
    compile_sizes = declared.compile_sizes(spec, level)
    changes += _switched_off(spec, level, passes, compile_sizes)
    if compilation.strict:
        refuse(changes)
    dtype = engine.dtype
    if dtype is DType.AUTO:
        dtype = platform.default_dtype if platform.default_dtype is not DType.AUTO else model_dtype
    return EffectiveConfig(
        requested_level=compilation.level,
        level=level,
        requested_mode=compilation.cudagraph_mode,
        mode=mode,
        capture_sizes=(
            () if mode is CUDAGraphMode.NONE else declared.requested_capture_sizes(spec)
        ),
        graph_memory_budget=compilation.graph_memory_bytes,
        capture_mode=compilation.capture_mode,
        capture_delay_milliseconds=compilation.capture_delay_milliseconds,
        splitting_ops=splitting,
        dtype=dtype,
        max_model_len=_max_model_len(engine.max_model_len, model_max_len),
        platform=platform,
        backend=compilation.backend,
        custom_ops=declared.custom_ops(compilation, level),
        compile_sizes=compile_sizes,
        passes=passes,
        cudagraph_copy_inputs=compilation.cudagraph_copy_inputs,
        quantization=engine.quantization,
        load_format=spec.model.load_format,
        prefix_caching=prefix_caching,
        changes=tuple(changes),
        warnings=(*_warnings(passes), *_tuning_warnings(spec, level, compile_sizes)),
    )


def with_graphs(
    effective: EffectiveConfig,
    *,
    mode: CUDAGraphMode,
    capture_sizes: tuple[int, ...],
    capture_mode: CaptureMode,
    changes: Sequence[ReasonedChange],
    strict: bool,
) -> EffectiveConfig:
    """``effective`` with what the capture left: graphs may not fit their memory, or not between two steps.

    Raises:
        ConfigError: there are changes and ``strict`` is set.
    """
    if strict:
        refuse(changes)
    return replace(
        effective,
        mode=mode,
        capture_sizes=capture_sizes,
        capture_mode=capture_mode,
        changes=(*effective.changes, *changes),
    )


def refuse(changes: Sequence[ReasonedChange]) -> None:
    """What ``strict`` does with differences.  When graphs are captured is none: ready only comes later.

    Raises:
        ConfigError: there is one.
    """
    lower = [c for c in changes if c.reason is not ConfigReason.CAPTURE_DELAY_LIMIT]
    if not lower:
        return
    text = "; ".join(
        f"{c.field} {c.requested} -> {c.effective} ({c.reason}: {c.message})" for c in lower
    )
    raise ConfigError(
        f"strict is set and the configuration cannot be had as requested: {text}",
        where="compilation.strict",
        hint="Request what is supported, or set strict: false",
    )


def _level(spec: ModelDeploymentSpec) -> tuple[CompilationLevel, list[ReasonedChange]]:
    level, off = spec.compilation.level, CompilationLevel.NO_COMPILATION
    if not spec.engine.enforce_eager or level is off:
        return level, []
    why = "enforceEager is set"
    return off, [ReasonedChange("level", str(int(level)), "0", ConfigReason.ENFORCE_EAGER, why)]


def _mode(
    spec: ModelDeploymentSpec,
    level: CompilationLevel,
    splitting: tuple[str, ...],
    platform: PlatformFacts,
    mixer_ops: tuple[str, ...],
) -> tuple[CUDAGraphMode, list[ReasonedChange]]:
    """The mode in force, lowered one reason at a time."""
    mode = spec.compilation.cudagraph_mode
    changes: list[ReasonedChange] = []

    def lower(to: CUDAGraphMode, reason: ConfigReason, why: str) -> None:
        nonlocal mode
        if to is not mode:
            changes.append(ReasonedChange("cudagraphMode", str(mode), str(to), reason, why))
            mode = to

    if spec.engine.enforce_eager:
        lower(CUDAGraphMode.NONE, ConfigReason.ENFORCE_EAGER, "enforceEager is set")
    if platform.graph_backend == NO_GRAPHS:
        lower(
            CUDAGraphMode.NONE,
            ConfigReason.PLATFORM_UNSUPPORTED,
            f"platform {platform.name} cannot record graphs",
        )
    if mode.requires_piecewise_compilation() and level is not CompilationLevel.PIECEWISE:
        to = (
            CUDAGraphMode.FULL_DECODE_ONLY
            if mode.has_mode(CUDAGraphMode.FULL)
            else CUDAGraphMode.NONE
        )
        lower(
            to,
            ConfigReason.LEVEL_TOO_LOW,
            f"level {int(level)} does not split the graph into pieces",
        )
    if mode.requires_piecewise_compilation() and not splitting:
        lower(
            CUDAGraphMode.FULL,
            ConfigReason.EMPTY_SPLITTING_OPS,
            "with no splitting ops the only piece is the whole forward",
        )

    def limit(
        ops: tuple[str, ...], support: AttentionGraphSupport, reason: ConfigReason, who: str
    ) -> None:
        """Keep ``ops`` out of the graphs that cannot have them."""
        why = f"{who} supports {support.name} in a graph"
        split_out = declared.split_out(splitting, ops)

        def records(part: CUDAGraphMode) -> bool:
            return part is CUDAGraphMode.FULL or (part is CUDAGraphMode.PIECEWISE and not split_out)

        if records(mode.mixed_mode()) and support < AttentionGraphSupport.ALWAYS:
            pieces = level is CompilationLevel.PIECEWISE and split_out
            to = CUDAGraphMode.FULL_AND_PIECEWISE if pieces else CUDAGraphMode.FULL_DECODE_ONLY
            lower(to, reason, why)
        if records(mode.decode_mode()) and support is AttentionGraphSupport.NEVER:
            pieces = mode.requires_piecewise_compilation()
            lower(CUDAGraphMode.PIECEWISE if pieces else CUDAGraphMode.NONE, reason, why)

    limit(
        ATTENTION_OPS,
        platform.attention_graph_support,
        ConfigReason.ATTENTION_BACKEND_LIMIT,
        f"attention backend {platform.attention_backend}",
    )
    if mixer_ops:
        who = f"the state-space mixer on {platform.name}"
        limit(mixer_ops, platform.mixer_graph_support, ConfigReason.MIXER_LIMIT, who)
    return mode, changes


def _switched_off(
    spec: ModelDeploymentSpec,
    level: CompilationLevel,
    passes: PassConfig,
    compile_sizes: tuple[int, ...],
) -> list[ReasonedChange]:
    """The fusions and static sizes that were asked for and have nothing to work on."""
    compilation = spec.compilation
    reason, why = _why_off(compilation, level, enforce_eager=spec.engine.enforce_eager)
    changes = []
    for name in FUSION_PASSES:
        if getattr(compilation.passes, name) and not getattr(passes, name):
            changes.append(ReasonedChange(_pass_field(name), "true", "false", reason, why))
    if compilation.compile_sizes and not compile_sizes:
        # Short, because the status of a ModelDeployment holds no more.
        listed = ", ".join(map(str, compilation.compile_sizes))
        requested = textwrap.shorten(listed, 300, placeholder=" ...")
        changes.append(ReasonedChange("compileSizes", requested, "none", reason, why))
    return changes


def _why_off(
    compilation: CompilationConfig, level: CompilationLevel, *, enforce_eager: bool
) -> tuple[ConfigReason, str]:
    """Why a fusion or static size is off, if one is; the splitting ops are what is left."""
    if enforce_eager:
        return ConfigReason.ENFORCE_EAGER, "enforceEager is set"
    if level is not CompilationLevel.PIECEWISE:
        return ConfigReason.LEVEL_TOO_LOW, f"level {int(level)} compiles no pieces"
    if compilation.backend is CompilerBackendName.EAGER:
        return ConfigReason.EAGER_BACKEND, "backend eager generates no code"
    return (
        ConfigReason.SPLITTING_OPS_LIMIT,
        "the splitting ops keep attention out of the compiled pieces, where the pass looks for it",
    )


def _warnings(passes: PassConfig) -> tuple[ReasonedChange, ...]:
    if passes.noop_elimination:
        return ()
    why = "without noopElimination, reshapes that change nothing may hide the pattern"
    return tuple(
        ReasonedChange(_pass_field(name), "true", "true", ConfigReason.MISSING_DEPENDENCY, why)
        for name in FUSION_PASSES
        if getattr(passes, name)
    )


def _tuning_warnings(
    spec: ModelDeploymentSpec, level: CompilationLevel, compile_sizes: tuple[int, ...]
) -> tuple[ReasonedChange, ...]:
    if not declared.inductor_compiles_pieces(spec.compilation, level):
        return ()
    return tuning_warnings(spec.compilation.inductor_config or {}, compile_sizes)


def _pass_field(name: str) -> str:
    return f"passes.{PassConfig.model_fields[name].alias}"


def _max_model_len(requested: int | None, model_max_len: int) -> int:
    if requested is not None and requested > model_max_len:
        raise ConfigError(
            f"maxModelLen {requested} is above the model's own limit of {model_max_len} tokens",
            where="engine.maxModelLen",
            hint=f"Set it to {model_max_len} or less, or leave it out",
        )
    return requested or model_max_len
