"""Everything that happens once: from a document and a path to an engine that can step.

weights -> cache verdict -> load or compile -> warm-up -> estimate -> KV cache -> capture.  Split from ``core`` so
that importing torch is itself a timed phase.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor

from kerf_runtime.cache import CacheSession
from kerf_runtime.compilation.prepare import PreparedModel, prepare_model
from kerf_runtime.compilation.workers import start_fork_server
from kerf_runtime.config import (
    CacheVerification,
    CompilationLevel,
    CUDAGraphMode,
    EffectiveConfig,
    EngineConfig,
    ModelDeploymentSpec,
    cache_key,
    declared_factors,
    needs_compile_cache,
    resolve,
)
from kerf_runtime.config.resolve import refuse, with_graphs
from kerf_runtime.cudagraph.decode_head import DecodeHead
from kerf_runtime.cudagraph.descriptor import BatchDescriptor, DispatchDecision
from kerf_runtime.cudagraph.runner import GraphRunner, named_tensors
from kerf_runtime.engine.args import EngineArgs
from kerf_runtime.engine.dump import write_dump
from kerf_runtime.engine.kv_cache import allocate_kv_cache, kv_cache_bytes, plan_blocks
from kerf_runtime.engine.phases import PhaseClock, Progress
from kerf_runtime.engine.report import log_changes, log_graphs, resolution
from kerf_runtime.engine.runner import ComputesLogits, ModelRunner
from kerf_runtime.engine.scheduler import Scheduler, SchedulerLimits
from kerf_runtime.engine.started import StartedEngine
from kerf_runtime.engine.state_cache import allocate_states
from kerf_runtime.errors import CacheError
from kerf_runtime.models import LoadedModel, load_model, model_config_digest, read_model_config
from kerf_runtime.models.config import ModelConfig
from kerf_runtime.models.loader import torch_dtype
from kerf_runtime.platforms import Platform, current_platform
from kerf_runtime.platforms.interface import DeviceMemory
from kerf_runtime.reasons import CacheReason, DispatchReason

__all__ = [
    "CompiledModel",
    "after_capture",
    "compile_only",
    "start_engine",
]

logger = logging.getLogger(__name__)

_WARMUP_TOKENS = 64
"""Enough for every kernel and thread pool to have been used once."""


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
    memory = platform.memory()
    if memory is None:
        # Refused before the weights are read: nothing of it needs them.
        _plan_blocks(config, spec.engine, effective, memory)
    cache, loaded = _load(args, spec, effective, platform, clock)
    prepared = _prepare(args, spec, effective, loaded, cache, platform, clock, progress)
    if args.debug_dump_path is not None:
        write_dump(args.debug_dump_path, prepared, resolution(effective, cache))

    def allocate(num_blocks: int) -> Mapping[str, tuple[Tensor, Tensor]]:
        return allocate_kv_cache(
            loaded.attention_layers,
            config,
            num_blocks=num_blocks,
            block_size=spec.engine.block_size,
            dtype=torch_dtype(effective.dtype),
            device=platform.device,
        )

    def allocate_slots(slots: int) -> Mapping[str, tuple[Tensor, Tensor]]:
        return allocate_states(
            loaded.mixer_layers,
            config,
            slots=slots,
            dtype=torch_dtype(effective.dtype),
            device=platform.device,
        )

    limits = SchedulerLimits(
        max_num_seqs=spec.engine.max_num_seqs,
        max_num_batched_tokens=spec.engine.max_num_batched_tokens,
        max_model_len=effective.max_model_len,
        vocab_size=config.vocab_size,
        block_size=spec.engine.block_size,
        num_blocks=1,
        prefix_caching=effective.prefix_caching,
    )
    runner = ModelRunner(
        loaded.model,
        limits,
        capture_sizes=effective.capture_sizes,
        # Batches made up for warm-up and recording read block 0 and the slot of padding only.
        kv_caches=allocate(1),
        windows=loaded.windows,
        states=allocate_slots(1),
        device=platform.device,
    )
    graphs = GraphRunner(
        prepared,
        effective,
        platform,
        max_num_seqs=limits.max_num_seqs,
        max_tokens=limits.max_num_batched_tokens,
        weights=lambda: named_tensors(loaded.model),
        head=_decode_head(loaded, effective, platform),
        debug=args.debug_dump_path is not None,
    )
    with clock.phase("warmup"):
        activations = _warm_up(runner, graphs, limits, platform)
    graph_bytes = 0
    if effective.mode is not CUDAGraphMode.NONE:
        with clock.phase("estimate", f"memory of {len(graphs.plan)} graphs"):
            graph_bytes = graphs.estimate_memory(runner.make_dummy_batch, clock.report("estimate"))
        if spec.compilation.strict:
            refuse(graphs.changes)
    with clock.phase("kv_alloc"):
        num_blocks = _plan_blocks(
            config,
            spec.engine,
            effective,
            platform.memory(),
            activations=activations,
            graphs=graph_bytes,
        )
        clock.report("kv_alloc")(f"{num_blocks} blocks", None)
        runner.kv_caches = allocate(num_blocks)
        runner.states = allocate_slots(limits.max_num_seqs + 1)
        limits = replace(limits, num_blocks=num_blocks)
    if effective.mode is not CUDAGraphMode.NONE:
        with clock.phase("capture", f"{len(graphs.plan)} graphs"):
            graphs.capture_all(runner.make_dummy_batch, clock.report("capture"))
        graphs.check_weights()
    started = StartedEngine(config, effective, prepared, cache, Scheduler(limits), runner, graphs)
    return after_capture(started, strict=spec.compilation.strict)


def after_capture(started: StartedEngine, *, strict: bool = False) -> StartedEngine:
    """Log what was captured, and put what capturing changed into the effective configuration.

    Args:
        started: all its graphs, or the first of a progressive capture, are captured.
        strict: refuse changes; a running engine goes on with them.

    Raises:
        ConfigError: there are changes and ``strict`` is set.
    """
    graphs, effective = started.graphs, started.effective
    if effective.mode is not CUDAGraphMode.NONE:
        log_graphs(graphs.report())
    new = [change for change in graphs.changes if change not in effective.changes]
    if not new:
        return started
    log_changes(new)
    told_anew = {(change.field, change.reason) for change in new}
    others = (c for c in effective.changes if (c.field, c.reason) not in told_anew)
    effective = with_graphs(
        replace(effective, changes=tuple(others)),
        mode=graphs.mode,
        capture_sizes=graphs.capture_sizes,
        capture_mode=graphs.capture_mode,
        changes=new,
        strict=strict,
    )
    return replace(started, effective=effective)


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
        mixer_ops=config.mixer_ops,
    )
    log_changes((*effective.changes, *effective.warnings))
    return config, effective


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
            load_format=effective.load_format,
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


def _decode_head(
    loaded: LoadedModel, effective: EffectiveConfig, platform: Platform
) -> DecodeHead | None:
    """What full graphs of decode batches compute beside hidden states; None if there are no such graphs."""
    if effective.mode.decode_mode() is not CUDAGraphMode.FULL:
        return None
    return DecodeHead(
        cast(ComputesLogits, loaded.model).compute_logits,
        vocab_size=loaded.config.vocab_size,
        dtype=torch_dtype(effective.dtype),
        largest=max(effective.capture_sizes),
        device=platform.device,
    )


def _warm_up(
    runner: ModelRunner, graphs: GraphRunner, limits: SchedulerLimits, platform: Platform
) -> int:
    """Run a mixed and a decode batch without graphs, so that lazy initialisation is over.

    Where the device tells its memory the mixed batch is the largest there is.

    Returns:
        Bytes of the device that the largest step needs beside weights and KV cache; 0 if it cannot tell.
        They are free again, so whoever sizes the KV cache sets them aside; what stays in use for good, such
        as workspaces of libraries, is not among them.
    """
    platform.release_memory()
    tokens, rows = limits.max_num_batched_tokens, limits.max_num_seqs
    if platform.memory() is None:
        tokens, rows = min(_WARMUP_TOKENS, tokens), 1
    for size, uniform in ((tokens, False), (1, True)):
        descriptor = BatchDescriptor(size, uniform)
        decision = DispatchDecision(CUDAGraphMode.NONE, descriptor, DispatchReason.MODE_NONE)
        hidden = graphs.run(decision, *runner.make_dummy_batch(descriptor)).hidden
        runner.warm_up_sampling(hidden[:rows])
    del hidden
    peak = platform.memory()
    platform.release_memory()
    left = platform.memory()
    return 0 if peak is None or left is None else peak.reserved - left.reserved


def _plan_blocks(
    config: ModelConfig,
    engine: EngineConfig,
    effective: EffectiveConfig,
    memory: DeviceMemory | None,
    *,
    activations: int = 0,
    graphs: int = 0,
) -> int:
    """Blocks of the KV cache; see ``kv_cache_bytes`` for the arguments."""
    return plan_blocks(
        config,
        kv_cache_bytes(engine, memory, activations=activations, graphs=graphs),
        engine.model_copy(update={"prefix_caching": effective.prefix_caching}),
        max_model_len=effective.max_model_len,
        itemsize=torch_dtype(effective.dtype).itemsize,
    )
