"""Everything that happens once: from a document and a path to an engine that can step.

weights -> cache verdict -> load or compile -> KV cache -> warm-up -> capture.  Split from ``core`` so
that importing torch is itself a timed phase.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kerf_runtime.cache import CacheSession
from kerf_runtime.compilation.prepare import PreparedModel, prepare_model
from kerf_runtime.compilation.workers import start_fork_server
from kerf_runtime.config import (
    CacheVerification,
    CompilationLevel,
    CUDAGraphMode,
    EffectiveConfig,
    ModelDeploymentSpec,
    cache_key,
    declared_factors,
    needs_compile_cache,
    resolve,
)
from kerf_runtime.config.resolve import with_graphs
from kerf_runtime.cudagraph.descriptor import BatchDescriptor, DispatchDecision
from kerf_runtime.cudagraph.runner import GraphRunner, named_tensors
from kerf_runtime.engine.args import EngineArgs
from kerf_runtime.engine.dump import write_dump
from kerf_runtime.engine.kv_cache import allocate_kv_cache, plan_blocks
from kerf_runtime.engine.phases import PhaseClock, Progress
from kerf_runtime.engine.runner import ModelRunner
from kerf_runtime.engine.scheduler import Scheduler, SchedulerLimits
from kerf_runtime.errors import CacheError
from kerf_runtime.models import LoadedModel, load_model, model_config_digest, read_model_config
from kerf_runtime.models.config import ModelConfig
from kerf_runtime.models.loader import torch_dtype
from kerf_runtime.platforms import Platform, current_platform
from kerf_runtime.reasons import CacheReason, DispatchReason, ReasonedChange

__all__ = ["CompiledModel", "StartedEngine", "compile_only", "describe", "start_engine"]

logger = logging.getLogger(__name__)

_WARMUP_TOKENS = 64
"""Enough for every kernel and thread pool to have been used once."""


@dataclass(frozen=True)
class StartedEngine:
    """The parts of a running engine."""

    config: ModelConfig
    effective: EffectiveConfig
    prepared: PreparedModel
    cache: CacheSession
    scheduler: Scheduler
    runner: ModelRunner
    graphs: GraphRunner


@dataclass(frozen=True)
class CompiledModel:
    """What ``compile_only`` leaves: the verdict and manifest are in ``cache``."""

    effective: EffectiveConfig
    prepared: PreparedModel
    cache: CacheSession


def compile_only(
    args: EngineArgs, spec: ModelDeploymentSpec, clock: PhaseClock, progress: Progress
) -> CompiledModel:
    """Make sure that the cache holds the compiled model: no KV cache, no capture, no engine.

    Raises:
        KerfError: whatever is wrong with configuration, model, cache or compilation.
    """
    platform = current_platform()
    _, effective = _resolve(args, spec, platform)
    cache, loaded = _load(args, spec, effective, platform, clock)
    prepared = _prepare(args, spec, effective, loaded, cache, platform, clock, progress)
    return CompiledModel(effective, prepared, cache)


def start_engine(
    args: EngineArgs, spec: ModelDeploymentSpec, clock: PhaseClock, progress: Progress
) -> StartedEngine:
    """Run every start-up phase.

    Raises:
        KerfError: whatever is wrong with configuration, model, cache, compilation or capture.
    """
    platform = current_platform()
    config, effective = _resolve(args, spec, platform)
    dtype = torch_dtype(effective.dtype)
    # Refused before the weights are read: none of it needs them.
    num_blocks = plan_blocks(
        config, spec.engine, max_model_len=effective.max_model_len, itemsize=dtype.itemsize
    )
    cache, loaded = _load(args, spec, effective, platform, clock)
    prepared = _prepare(args, spec, effective, loaded, cache, platform, clock, progress)
    if args.debug_dump_path is not None:
        write_dump(args.debug_dump_path, prepared, _resolution(effective, cache))

    limits = SchedulerLimits(
        max_num_seqs=spec.engine.max_num_seqs,
        max_num_batched_tokens=spec.engine.max_num_batched_tokens,
        max_model_len=effective.max_model_len,
        vocab_size=config.vocab_size,
        block_size=spec.engine.block_size,
        num_blocks=num_blocks,
    )
    with clock.phase("kv_alloc", f"{num_blocks} blocks"):
        kv_caches = allocate_kv_cache(
            loaded.attention_layers,
            config,
            num_blocks=num_blocks,
            block_size=spec.engine.block_size,
            dtype=dtype,
            device=platform.device,
        )
        runner = ModelRunner(
            loaded.model,
            limits,
            capture_sizes=effective.capture_sizes,
            kv_caches=kv_caches,
            device=platform.device,
        )
    graphs = GraphRunner(
        prepared,
        effective,
        platform,
        max_num_seqs=limits.max_num_seqs,
        max_tokens=limits.max_num_batched_tokens,
        weights=lambda: named_tensors(loaded.model),
        debug=args.debug_dump_path is not None,
    )
    with clock.phase("warmup"):
        _warm_up(runner, graphs, limits)
    if effective.mode is not CUDAGraphMode.NONE:
        with clock.phase("capture", f"{len(graphs.plan)} graphs"):
            graphs.capture_all(runner.make_dummy_batch, clock.report("capture"))
        _log_graphs(graphs.report())
    if graphs.changes:
        effective = with_graphs(
            effective,
            mode=graphs.mode,
            capture_sizes=graphs.capture_sizes,
            changes=graphs.changes,
            strict=spec.compilation.strict,
        )
        _log(graphs.changes)
    return StartedEngine(config, effective, prepared, cache, Scheduler(limits), runner, graphs)


def _resolve(
    args: EngineArgs, spec: ModelDeploymentSpec, platform: Platform
) -> tuple[ModelConfig, EffectiveConfig]:
    """The model's facts and the effective configuration; every change is logged."""
    config = read_model_config(args.model_path)
    effective = resolve(
        spec,
        platform=platform.facts(),
        model_max_len=config.max_position_embeddings,
        model_dtype=config.dtype,
    )
    _log((*effective.changes, *effective.warnings))
    return config, effective


def _log(changes: Iterable[ReasonedChange]) -> None:
    for change in changes:
        logger.info(
            "%s: %s -> %s (%s: %s)",
            change.field,
            change.requested,
            change.effective,
            change.reason,
            change.message,
        )


def _log_graphs(report: Mapping[str, Any]) -> None:
    """The sums of each mode; at level DEBUG every graph."""
    found: list[dict[str, Any]] = report["descriptors"]
    for mode in sorted({graph["mode"] for graph in found}):
        graphs = [graph for graph in found if graph["mode"] == mode]
        nodes, size, seconds = (
            sum(g[key] for g in graphs) for key in ("nodes", "bytes", "seconds")
        )
        logger.info(
            "captured %d %s graphs (%s): %d nodes, %d bytes, %.3f s",
            len(graphs),
            mode,
            report["backend"],
            nodes,
            size,
            seconds,
        )
    for graph in found:
        logger.debug(
            "graph %s %s of %d tokens: %d nodes, %d bytes, %.6f s",
            graph["mode"],
            "decode" if graph["uniform_decode"] else "mixed",
            graph["num_tokens"],
            graph["nodes"],
            graph["bytes"],
            graph["seconds"],
        )


def _load(
    args: EngineArgs,
    spec: ModelDeploymentSpec,
    effective: EffectiveConfig,
    platform: Platform,
    clock: PhaseClock,
) -> tuple[CacheSession, LoadedModel]:
    """Verify the cache, then read the weights."""
    with clock.phase("cache_verify", str(args.cache_dir or "")):
        cache = _open_cache(args, spec)
    if effective.level is CompilationLevel.PIECEWISE and cache.manifest is None:
        start_fork_server(effective.backend.value, platform.device)
    with clock.phase("weights", str(args.model_path)):
        loaded = load_model(
            args.model_path,
            dtype=torch_dtype(effective.dtype),
            device=platform.device,
            quantization=effective.quantization,
            max_model_len=effective.max_model_len,
            progress=clock.report("weights"),
        )
    return cache, loaded


def _open_cache(args: EngineArgs, spec: ModelDeploymentSpec) -> CacheSession:
    if not needs_compile_cache(spec):
        return CacheSession.unused(CacheReason.NOT_NEEDED, "only level 3 is cached")
    in_cluster = args.expected_cache_key is not None
    declared = declared_factors(
        spec,
        image=args.image,
        model_config_digest=None if in_cluster else model_config_digest(args.model_path),
    )
    if in_cluster and cache_key(declared) != args.expected_cache_key:
        raise CacheError(
            f"the operator expects cache key {args.expected_cache_key}, this image computes "
            f"{cache_key(declared)}",
            where="KERF_CACHE_KEY",
            hint="Operator and runtime image are of different versions; use those of one release",
        )
    return CacheSession.open(
        args.cache_dir,
        declared,
        read_only=args.cache_read_only,
        checksums=spec.cache.verification is CacheVerification.CHECKSUM,
    )


def _prepare(
    args: EngineArgs,
    spec: ModelDeploymentSpec,
    effective: EffectiveConfig,
    loaded: LoadedModel,
    cache: CacheSession,
    platform: Platform,
    clock: PhaseClock,
    progress: Progress,
) -> PreparedModel:
    def report(phase: str, detail: str, fraction: float | None) -> None:
        """Map the compiler's own steps to start-up phases; the step becomes the detail."""
        if phase in ("trace", "cache_load"):
            progress(phase, detail, fraction)
        else:
            progress("compile", f"{phase}: {detail}" if detail else phase, fraction)

    prepared = prepare_model(
        loaded,
        spec=spec,
        effective=effective,
        cache=cache,
        platform=platform,
        model_config_digest=model_config_digest(args.model_path),
        progress=report,
        dump=args.debug_dump_path,
    )
    timings = dict(prepared.timings)
    for phase in ("cache_load", "trace"):
        if phase in timings:
            clock.seconds[phase] = timings.pop(phase)
    if effective.level is not CompilationLevel.NO_COMPILATION and timings:
        clock.seconds["compile"] = sum(timings.values())
    return prepared


def _warm_up(runner: ModelRunner, graphs: GraphRunner, limits: SchedulerLimits) -> None:
    """Run a decode and a mixed batch without graphs, so that lazy initialisation is over."""
    for size, uniform in ((min(_WARMUP_TOKENS, limits.max_num_batched_tokens), False), (1, True)):
        descriptor = BatchDescriptor(size, uniform)
        decision = DispatchDecision(CUDAGraphMode.NONE, descriptor, DispatchReason.MODE_NONE)
        hidden = graphs.run(decision, *runner.make_dummy_batch(descriptor))
        runner.warm_up_sampling(hidden)


def describe(started: StartedEngine, startup_seconds: Mapping[str, float]) -> dict[str, Any]:
    """The static part of ``/debug/graphs``."""
    prepared = started.prepared
    return {
        **_resolution(started.effective, started.cache),
        "graphs": started.graphs.report(),
        "compile": {k: v for k, v in prepared.timings.items() if k != "cache_load"},
        "compiled": prepared.report(),
        "startup": dict(startup_seconds),
    }


def _resolution(effective: EffectiveConfig, cache: CacheSession) -> dict[str, Any]:
    """What is in force beside what was asked for, and what the cache said."""
    return {
        "cache": {
            "key": cache.key,
            "result": cache.verdict.result,
            "reason": str(cache.verdict.reason),
            "message": cache.verdict.message,
            "bytes": cache.manifest.total_bytes if cache.manifest is not None else 0,
        },
        "effective": effective.to_json(),
    }
