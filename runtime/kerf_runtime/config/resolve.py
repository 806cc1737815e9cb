"""From the requested to the effective configuration, with a reason for every difference.  Pure.

``resolve`` is the only place where a mode, a level or a size is changed.  The result travels to the
log, ``/debug/graphs``, the ``kerf_effective_config_info`` metric and ``status.graphs``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

from kerf_runtime.config.compilation import ATTENTION_OPS, CompilationLevel, CUDAGraphMode
from kerf_runtime.config.deployment import ModelDeploymentSpec
from kerf_runtime.config.engine import DType
from kerf_runtime.errors import ConfigError
from kerf_runtime.reasons import ConfigReason, ReasonedChange

__all__ = [
    "AttentionGraphSupport",
    "EffectiveConfig",
    "PlatformFacts",
    "default_capture_sizes",
    "resolve",
]


class AttentionGraphSupport(IntEnum):
    """Which batches an attention implementation can have inside a full graph."""

    NEVER = 0
    SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


@dataclass(frozen=True)
class PlatformFacts:
    """What resolution must know about the machine; made by ``kerf_runtime.platforms``."""

    name: str
    graph_backend: str
    attention_backend: str
    attention_graph_support: AttentionGraphSupport
    default_dtype: DType


@dataclass(frozen=True)
class EffectiveConfig:
    """What is in force, beside what was asked for."""

    requested_level: CompilationLevel
    level: CompilationLevel
    requested_mode: CUDAGraphMode
    mode: CUDAGraphMode
    capture_sizes: tuple[int, ...]
    splitting_ops: tuple[str, ...]
    dtype: DType
    max_model_len: int
    platform: PlatformFacts
    changes: tuple[ReasonedChange, ...]

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready description for ``/debug/graphs``."""
        data = asdict(self)
        data["level"], data["requested_level"] = int(self.level), int(self.requested_level)
        return data


def default_capture_sizes(max_num_seqs: int, max_num_batched_tokens: int) -> tuple[int, ...]:
    """1, 2, 4, then multiples of 8 up to the first one that holds ``max_num_seqs`` sequences.

    The largest size never exceeds ``max_num_batched_tokens`` and is always exactly reachable.
    """
    top = min(
        -(-max_num_seqs // 8) * 8 if max_num_seqs > 4 else max_num_seqs, max_num_batched_tokens
    )
    sizes = {size for size in (1, 2, 4, *range(8, top + 1, 8)) if size <= top}
    return tuple(sorted(sizes | {top}))


def resolve(
    spec: ModelDeploymentSpec, *, platform: PlatformFacts, model_max_len: int, model_dtype: DType
) -> EffectiveConfig:
    """The effective configuration of ``spec`` on ``platform``.

    Args:
        spec: the requested configuration.
        platform: facts about the machine.
        model_max_len: the longest sequence the checkpoint supports, in tokens.
        model_dtype: the checkpoint's own data type.

    Raises:
        ConfigError: contradictory, impossible, or a downgrade under ``strict``.
    """
    changes: list[ReasonedChange] = []
    compilation, engine = spec.compilation, spec.engine

    def change(field: str, before: object, after: object, reason: ConfigReason, why: str) -> None:
        changes.append(ReasonedChange(field, str(before), str(after), reason, why))

    level = compilation.level
    if engine.enforce_eager and level is not CompilationLevel.NO_COMPILATION:
        change("level", int(level), 0, ConfigReason.ENFORCE_EAGER, "enforceEager is set")
        level = CompilationLevel.NO_COMPILATION

    splitting = (
        ATTENTION_OPS if compilation.splitting_ops is None else tuple(compilation.splitting_ops)
    )
    mode = compilation.cudagraph_mode

    def lower(to: CUDAGraphMode, reason: ConfigReason, why: str) -> None:
        nonlocal mode
        if to is not mode:
            change("cudagraphMode", mode, to, reason, why)
            mode = to

    if engine.enforce_eager:
        lower(CUDAGraphMode.NONE, ConfigReason.ENFORCE_EAGER, "enforceEager is set")
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
    support = platform.attention_graph_support
    limit = (
        f"attention backend {platform.attention_backend} supports {support.name} in a full graph"
    )
    if mode.mixed_mode() is CUDAGraphMode.FULL and support < AttentionGraphSupport.ALWAYS:
        splits = level is CompilationLevel.PIECEWISE and bool(splitting)
        to = CUDAGraphMode.FULL_AND_PIECEWISE if splits else CUDAGraphMode.FULL_DECODE_ONLY
        lower(to, ConfigReason.ATTENTION_BACKEND_LIMIT, limit)
    if mode.decode_mode() is CUDAGraphMode.FULL and support is AttentionGraphSupport.NEVER:
        to = (
            CUDAGraphMode.PIECEWISE if mode.requires_piecewise_compilation() else CUDAGraphMode.NONE
        )
        lower(to, ConfigReason.ATTENTION_BACKEND_LIMIT, limit)

    if compilation.strict and changes:
        text = "; ".join(
            f"{c.field} {c.requested} -> {c.effective} ({c.reason}: {c.message})" for c in changes
        )
        raise ConfigError(
            f"strict is set and the configuration cannot be had as requested: {text}",
            where="compilation.strict",
            hint="Request what is supported, or set strict: false",
        )

    max_model_len = _max_model_len(engine.max_model_len, model_max_len)
    sizes = _capture_sizes(spec, mode)
    dtype = engine.dtype
    if dtype is DType.AUTO:
        dtype = platform.default_dtype if platform.default_dtype is not DType.AUTO else model_dtype
    return EffectiveConfig(
        requested_level=compilation.level,
        level=level,
        requested_mode=compilation.cudagraph_mode,
        mode=mode,
        capture_sizes=sizes,
        splitting_ops=splitting,
        dtype=dtype,
        max_model_len=max_model_len,
        platform=platform,
        changes=tuple(changes),
    )


def _max_model_len(requested: int | None, model_max_len: int) -> int:
    if requested is not None and requested > model_max_len:
        raise ConfigError(
            f"maxModelLen {requested} is above the model's own limit of {model_max_len} tokens",
            where="engine.maxModelLen",
            hint=f"Set it to {model_max_len} or less, or leave it out",
        )
    return requested or model_max_len


def _capture_sizes(spec: ModelDeploymentSpec, mode: CUDAGraphMode) -> tuple[int, ...]:
    if mode is CUDAGraphMode.NONE:
        return ()
    engine = spec.engine
    requested = spec.compilation.capture_sizes
    if requested is None:
        return default_capture_sizes(engine.max_num_seqs, engine.max_num_batched_tokens)
    if requested[-1] > engine.max_num_batched_tokens:
        raise ConfigError(
            f"capture size {requested[-1]} is above maxNumBatchedTokens {engine.max_num_batched_tokens}: "
            "no step is that large",
            where="compilation.captureSizes",
            hint="Remove the size or raise engine.maxNumBatchedTokens",
        )
    return tuple(requested)
