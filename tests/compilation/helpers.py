"""Short ways to prepare and run the models of ``tests.compilation.models``; imports no compiler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kerf_runtime.cache import CacheSession
from kerf_runtime.compilation.prepare import PreparedModel, prepare_model
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

# Without trying every instruction set with the C++ compiler first, and with its 120 MB of parsed headers kept
# in a folder of the machine: a kernel then takes the compiler 0.8 s instead of 2.1 s.  What is compiled is
# the same, and every compilation is still made.
QUICK = {"cpp.vec_isa_ok": True, "cpp_cache_precompile_headers": True}


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
