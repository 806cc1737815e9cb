"""The cache key: which declared facts make compiled artifacts valid.  Pure, no torch.

Two hashes are never mixed.  The *cache key* covers what changes generated code; replicas, probes,
labels, capture sizes and the CUDA-graph mode are not in it.  The *revision* (what makes pods differ)
belongs to the operator.

Declared factors can be computed by the operator from the resource alone.  The model is identified by
what the document declares (claim and path, or image reference); a local folder has no stable name, so
its ``config.json`` digest is used.  What only the runtime can see (torch, CPU, traced sources, the
config digest of a claim) is in the manifest as *observed* factors and compared at load.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from kerf_runtime.config.compilation import ATTENTION_OPS, CompilationLevel
from kerf_runtime.config.deployment import ModelDeploymentSpec, ModelSource

__all__ = [
    "KEY_FORMAT",
    "cache_key",
    "canonical_json",
    "compile_document",
    "declared_factors",
    "digest",
    "needs_compile_cache",
]

KEY_FORMAT = 1
"""Raised when the meaning of a factor or the layout of a cache folder changes."""


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def digest(value: Any) -> str:
    """sha256 of the canonical JSON of ``value``, as 64 hex digits."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def needs_compile_cache(spec: ModelDeploymentSpec) -> bool:
    """Whether the deployment compiles anything at all."""
    return (
        spec.compilation.level is not CompilationLevel.NO_COMPILATION
        and not spec.engine.enforce_eager
    )


def declared_factors(
    spec: ModelDeploymentSpec, *, image: str, model_config_digest: str | None = None
) -> dict[str, Any]:
    """The declared factors of the cache key.

    Args:
        spec: the document.
        image: the runtime image reference; ``local`` outside a cluster.
        model_config_digest: sha256 of ``config.json`` if the model is a local folder given on the
            command line instead of the source in ``spec``.
    """
    compilation = spec.compilation
    return {
        "format": KEY_FORMAT,
        "model": (
            {"configSha256": model_config_digest}
            if model_config_digest is not None
            else _source_identity(spec.model.source)
        ),
        "dtype": spec.engine.dtype.value,
        "level": int(compilation.level),
        "splittingOps": _splitting_ops(spec),
        "inductorConfig": compilation.inductor_config or {},
        "image": image,
        "accelerator": "cpu",
    }


def cache_key(factors: dict[str, Any]) -> str:
    """First 16 hex digits of the digest of the declared factors: the name of the cache folder."""
    return digest(factors)[:16]


def _source_identity(source: ModelSource) -> dict[str, Any]:
    return source.to_document()


def _splitting_ops(spec: ModelDeploymentSpec) -> list[str]:
    """The default written out: leaving it out and naming it is the same configuration."""
    ops = spec.compilation.splitting_ops
    return list(ATTENTION_OPS if ops is None else ops)


def compile_document(spec: ModelDeploymentSpec) -> dict[str, Any]:
    """The part of ``spec`` that the compile Job needs: equal for all specs with the same cache key."""
    document: dict[str, Any] = {
        "model": {"source": spec.model.source.to_document()},
        "engine": {"dtype": spec.engine.dtype.value},
        "compilation": {
            "level": int(spec.compilation.level),
            "splittingOps": _splitting_ops(spec),
        },
    }
    if spec.compilation.inductor_config:
        document["compilation"]["inductorConfig"] = dict(spec.compilation.inductor_config)
    return document
