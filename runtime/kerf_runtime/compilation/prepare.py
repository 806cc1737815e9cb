"""Turn a loaded model into one that runs: eager at level 0, from the cache, or compiled now.

Levels 1 and 2 are for debugging: the forward runs through Dynamo, and nothing is cached.  For level 3
this is the only place that decides between cache and compiler:

    hit                      load the artifact: 0 traces, 0 compilations
    miss, may write          compile, check numerics, publish, load what was published
    miss, may not write      compile into a temporary folder, check numerics, load (policy Auto)
    miss, policy Require     refuse to start, with the reason
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kerf_runtime.cache.session import CacheSession
from kerf_runtime.cache.store import write_error
from kerf_runtime.compilation.artifact import LoadedArtifact, load_artifact, write_artifact
from kerf_runtime.compilation.counters import compilation_counter
from kerf_runtime.compilation.factors import observed_factors
from kerf_runtime.config.compilation import CompilationLevel, CUDAGraphMode
from kerf_runtime.config.deployment import CachePolicy, ModelDeploymentSpec
from kerf_runtime.config.resolve import EffectiveConfig
from kerf_runtime.errors import CacheError, CompileError
from kerf_runtime.layers.custom_op import apply_policy
from kerf_runtime.platforms.interface import Platform
from kerf_runtime.reasons import CacheReason

__all__ = ["LoadedModelLike", "PreparedModel", "prepare_model"]

Progress = Callable[[str, str, float | None], None]


class LoadedModelLike(Protocol):
    """A model with its weights, as ``kerf_runtime.models.load_model`` returns it."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def config(self) -> Any: ...


@dataclass
class PreparedModel:
    """A model ready to be captured and run.

    Attributes:
        level: the level in force.
        artifact: the compiled pieces; None below level 3.
        whole: the compiled forward at levels 1 and 2.
        timings: seconds per phase (cache_load, or trace, split, inductor, save, parity).
        gate: result of the numerical gate if this process compiled.
    """

    model: nn.Module
    level: CompilationLevel
    artifact: LoadedArtifact | None
    whole: Callable[..., Any] | None = None
    timings: dict[str, float] = field(default_factory=dict)
    gate: dict[str, Any] = field(default_factory=dict)
    _holder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def forward(self) -> Callable[[Tensor, Tensor], Tensor]:
        """``forward(input_ids [T], positions [T]) -> hidden [T, hidden size]`` as it is stitched now."""
        return self._run

    def _run(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        if self.artifact is None:
            forward = self.model if self.whole is None else self.whole
            hidden: Tensor = forward(input_ids, positions)
            return hidden
        return self.artifact.forward(input_ids, positions)

    def wrap_pieces(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace every compiled piece by ``wrap(piece)``; below level 3 there are none."""
        if self.artifact is not None:
            self.artifact.wrap_pieces(wrap)

    def report(self) -> dict[str, Any]:
        """Pieces, distinct programs, timings and the gate's result."""
        plan = self.artifact.plan if self.artifact else None
        return {
            "level": int(self.level),
            "pieces": len(plan.steps) if plan else 0,
            "capturable": plan.capturable if plan else 0,
            "distinct": len(plan.piece_fingerprints) if plan else 0,
            "timings": dict(self.timings),
            "gate": dict(self.gate),
        }


def prepare_model(
    loaded: LoadedModelLike,
    *,
    spec: ModelDeploymentSpec,
    effective: EffectiveConfig,
    cache: CacheSession,
    platform: Platform,
    model_config_digest: str,
    progress: Progress,
    dump: Path | None = None,
) -> PreparedModel:
    """See the table in the module's docstring; ``cache.verdict`` holds the outcome afterwards.

    Args:
        dump: folder for what only a compilation knows: the graph around each pass, and the transformed
            bytecode of level 2.

    Raises:
        CacheError: a miss under policy Require.
        CompileError: the model cannot be compiled, or fails the numerical gate.
    """
    model = loaded.model
    apply_policy(model, frozenset(effective.custom_ops))
    if effective.level is CompilationLevel.NO_COMPILATION:
        return PreparedModel(model, effective.level, None)
    if effective.level is not CompilationLevel.PIECEWISE:
        return _compile_whole(model, spec, effective, progress, dump)
    dtype = effective.dtype.value

    def observed(sources: list[str] | tuple[str, ...]) -> dict[str, Any]:
        return observed_factors(
            model,
            platform=platform,
            model_config_digest=model_config_digest,
            sources=sources,
            dtype=dtype,
        )

    prepared = _from_cache(model, effective, cache, observed, progress)
    if prepared is not None:
        return prepared
    if spec.compile.policy is CachePolicy.REQUIRE and not cache.may_write:
        raise CacheError(
            f"compile.policy is Require and the cache cannot be used: {cache.verdict.reason}: "
            f"{cache.verdict.message}",
            where=cache.key,
            hint="Let the compile Job fill the cache, or set compile.policy to Auto",
        )
    if not cache.may_write:
        holder = tempfile.TemporaryDirectory(prefix="kerf-compiled-")
        folder = Path(holder.name)
        prepared, _ = _compile(loaded, spec, effective, platform, folder, progress, dump)
        prepared._holder = holder
        return prepared
    assert cache.store is not None
    with cache.store.writer(cache.key):
        before = cache.verdict
        cache.refresh()
        prepared = _from_cache(model, effective, cache, observed, progress)
        if prepared is not None:
            return prepared
        with cache.staging() as staging:
            prepared, sources = _compile(
                loaded, spec, effective, platform, staging.path, progress, dump
            )
            progress("save", str(cache.folder), None)
            started = time.perf_counter()
            cache.publish(
                staging,
                observed=observed(sources),
                counters=compilation_counter.snapshot(),
                timings=prepared.timings,
                gate=prepared.gate,
            )
            prepared.timings["save"] = time.perf_counter() - started
        cache.verdict = before
    return prepared


def _from_cache(
    model: nn.Module,
    effective: EffectiveConfig,
    cache: CacheSession,
    observed: Callable[[list[str]], dict[str, Any]],
    progress: Progress,
) -> PreparedModel | None:
    """The model from the cache, or None with the reason in ``cache.verdict``."""
    if cache.manifest is None:
        return None
    progress("cache_load", str(cache.folder), None)
    started = time.perf_counter()
    if not cache.check_observed(observed(list(cache.manifest.observed.get("sources", {})))).hit:
        return None
    try:
        artifact = load_artifact(cache.folder, model)
    except CompileError as error:
        cache.miss(CacheReason.LOADER_REFUSED, str(error))
        return None
    _refuse_recorded_writes(artifact, effective)
    timings = {"cache_load": time.perf_counter() - started}
    return PreparedModel(model, effective.level, artifact, timings=timings)


def _refuse_recorded_writes(artifact: LoadedArtifact, effective: EffectiveConfig) -> None:
    """A model compiled for mode NONE may write its buffers; it cannot be recorded from the cache either."""
    if artifact.plan.state_writes and effective.mode is not CUDAGraphMode.NONE:
        raise CompileError(
            f"the forward writes {', '.join(artifact.plan.state_writes)}, and static graphs are on: "
            "every replay, of padded and warm-up batches too, would repeat it",
            hint="Set compilation.cudagraphMode to NONE, or keep what it writes outside of the forward",
        )


def _compile_whole(
    model: nn.Module,
    spec: ModelDeploymentSpec,
    effective: EffectiveConfig,
    progress: Progress,
    dump: Path | None,
) -> PreparedModel:
    """Levels 1 and 2: the first call compiles; it comes with the warm-up, before serving."""
    progress("trace", "importing the compiler", None)
    started = time.perf_counter()
    from kerf_runtime.compilation.once import CompiledForward

    whole = CompiledForward(
        model,
        level=effective.level,
        backend=effective.backend,
        options=dict(spec.compilation.inductor_config or {}),
        static_graphs=effective.mode is not CUDAGraphMode.NONE,
        dump_dir=dump,
    )
    timings = {"trace": time.perf_counter() - started}
    return PreparedModel(model, effective.level, None, whole, timings)


def _compile(
    loaded: LoadedModelLike,
    spec: ModelDeploymentSpec,
    effective: EffectiveConfig,
    platform: Platform,
    folder: Path,
    progress: Progress,
    dump: Path | None,
) -> tuple[PreparedModel, tuple[str, ...]]:
    """Compile into ``folder``, load from there and pass the numerical gate."""
    progress("trace", "importing the compiler", None)
    started = time.perf_counter()
    # Imported here: a warm start must not pay for Dynamo and Inductor.
    from kerf_runtime.compilation.compiler import CompileOptions, compile_model
    from kerf_runtime.compilation.gate import check_numerics, tolerance_for
    from kerf_runtime.compilation.probe import PieceProbe
    from kerf_runtime.forward_context import ForwardContext, set_forward_context

    importing = time.perf_counter() - started
    compiled = compile_model(
        loaded.model,
        CompileOptions(
            splitting_ops=effective.splitting_ops,
            backend=effective.backend.value,
            inductor=dict(spec.compilation.inductor_config or {}),
            sizes=effective.compile_sizes,
            passes=effective.passes,
            static_graphs=effective.mode is not CUDAGraphMode.NONE,
            dump=dump,
        ),
        device=platform.device,
        progress=progress,
    )
    try:
        write_artifact(folder, compiled.plan, compiled.pieces, compiled.graph_source)
    except OSError as error:
        raise write_error(folder, error) from error
    artifact = load_artifact(folder, loaded.model)
    progress("parity", "comparing compiled with eager", None)
    started = time.perf_counter()
    tolerance = tolerance_for(getattr(torch, effective.dtype.value))
    with set_forward_context(ForwardContext()):
        result = check_numerics(
            loaded.model,
            artifact.forward,
            loaded.model.compute_logits,  # type: ignore[arg-type]
            probe=PieceProbe(
                artifact,
                compiled.programs,
                limit=tolerance.max_piece_rel,
                roundings=tolerance.roundings,
            ),
            vocab_size=loaded.config.vocab_size,
            max_positions=loaded.config.max_position_embeddings,
            device=platform.device,
            tolerance=tolerance,
            static_sizes=effective.compile_sizes,
        )
    timings = {**compiled.timings, "parity": time.perf_counter() - started}
    timings["trace"] += importing  # seconds that are part of every compiling start
    prepared = PreparedModel(
        loaded.model, effective.level, artifact, timings=timings, gate=result.to_json()
    )
    return prepared, compiled.sources
