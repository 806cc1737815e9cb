"""Short ways to trace, split, stitch and prepare the models of ``tests.compilation.models``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from kerf_runtime.cache import CacheSession
from kerf_runtime.compilation.plan import InputRef, StitchPlan, build_plan, stitch
from kerf_runtime.compilation.prepare import PreparedModel, prepare_model
from kerf_runtime.compilation.split import SplitGraph, resolve_splitting_ops, split_graph
from kerf_runtime.compilation.trace import TracedGraph, trace_forward
from kerf_runtime.config import (
    DType,
    EffectiveConfig,
    ModelDeploymentSpec,
    declared_factors,
    resolve,
)
from kerf_runtime.forward_context import ForwardContext, set_forward_context
from kerf_runtime.models.loader import LoadedModel
from kerf_runtime.platforms import current_platform

ATTENTION = ("kerf::attention",)

# Without trying every instruction set with the C++ compiler first: half a minute on a busy machine.
QUICK = {"cpp.vec_isa_ok": True}


def make_spec(
    *, policy: str = "Auto", engine: Any = None, **compilation: Any
) -> ModelDeploymentSpec:
    """A spec for tests: compiles quickly."""
    return ModelDeploymentSpec.model_validate(
        {
            "model": {"source": {"pvc": {"claimName": "models"}}},
            "engine": engine or {},
            "compilation": {"inductorConfig": QUICK, **compilation},
            "compile": {"policy": policy},
        }
    )


def make_effective(spec: ModelDeploymentSpec, *, max_len: int = 128) -> EffectiveConfig:
    """``spec`` resolved for this machine."""
    return resolve(
        spec,
        platform=current_platform().facts(),
        model_max_len=max_len,
        model_dtype=DType.FLOAT32,
    )


def open_cache(
    root: Path | None,
    digest: str,
    *,
    spec: ModelDeploymentSpec | None = None,
    read_only: bool = False,
    checksums: bool = True,
) -> CacheSession:
    """The session of a model called ``digest``."""
    declared = declared_factors(
        make_spec() if spec is None else spec, image="test", model_config_digest=digest
    )
    return CacheSession.open(root, declared, read_only=read_only, checksums=checksums)


def prepare(
    loaded: LoadedModel,
    cache: CacheSession,
    *,
    digest: str = "test",
    spec: ModelDeploymentSpec | None = None,
    effective: EffectiveConfig | None = None,
    progress: Callable[[str, str, float | None], None] = lambda *_: None,
) -> PreparedModel:
    """``prepare_model`` with everything that tests do not care about filled in."""
    spec = make_spec() if spec is None else spec
    return prepare_model(
        loaded,
        spec=spec,
        effective=make_effective(spec) if effective is None else effective,
        cache=cache,
        platform=current_platform(),
        model_config_digest=digest,
        progress=progress,
    )


def example_arguments(tokens: int = 32) -> dict[str, Tensor]:
    ids = torch.zeros(tokens, dtype=torch.int64)
    return {"input_ids": ids, "positions": torch.zeros_like(ids)}


def trace(model: nn.Module) -> TracedGraph:
    """One Dynamo trace of ``model``."""
    return trace_forward(model, example_arguments())


def trace_and_split(
    model: nn.Module, ops: tuple[str, ...] = ATTENTION
) -> tuple[TracedGraph, SplitGraph]:
    """Trace ``model`` and cut it."""
    traced = trace(model)
    return traced, split_graph(traced.module, resolve_splitting_ops(ops))


def batch(tokens: int, *, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Random input ids and positions, int64 [tokens] each."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randint(64, (tokens,), generator=generator),
        torch.randint(128, (tokens,), generator=generator),
    )


@torch.inference_mode()
def run(forward: Callable[..., Tensor], tokens: int, *, seed: int = 1) -> Tensor:
    """``forward`` on a random batch, attention giving zeros."""
    with set_forward_context(ForwardContext()):
        return forward(*batch(tokens, seed=seed))


def as_sequence(piece: Callable[..., Any]) -> Callable[..., Any]:
    """A piece of a split graph, called as a compiled one is: it returns a sequence."""

    def call(*inputs: Any) -> Any:
        result = piece(*inputs)
        return () if result is None else result if isinstance(result, tuple) else (result,)

    return call


def stitch_eagerly(
    plan: StitchPlan, split: SplitGraph, state: dict[str, Tensor]
) -> Callable[..., Tensor]:
    """The stitched forward with the uncompiled pieces."""
    modules = {piece.name: piece.module for piece in split.pieces}
    pieces = {
        index: as_sequence(modules[step.name])
        for index, step in enumerate(plan.steps)
        if step.kind == "piece"
    }
    return stitch(plan, pieces, state)


def plan_of_graph(module: fx.GraphModule, ops: tuple[str, ...]) -> tuple[StitchPlan, SplitGraph]:
    """Plan of a hand-made graph whose placeholders are all arguments."""
    names = tuple(str(n.target) for n in module.graph.nodes if n.op == "placeholder")
    refs = tuple(InputRef("argument", name) for name in names)
    split = split_graph(module, resolve_splitting_ops(ops))
    fingerprints = {piece.name: piece.name for piece in split.compilable}
    return build_plan(TracedGraph(module, refs, (), ()), split, fingerprints, names), split
