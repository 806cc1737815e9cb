"""The cache key: which declared facts make compiled artifacts valid.  Pure, no torch.

Two hashes are never mixed.  The *cache key* covers what changes generated code; replicas, probes,
labels and the CUDA-graph mode are not in it, nor are capture sizes unless ``compileSizes`` asks for a
static compilation of each.  Factors are what is in force, with defaults written out, so that leaving a
default out and naming it is the same configuration.  The *revision* (what makes pods differ)
belongs to the operator.

Declared factors can be computed by the operator from the resource alone.  The model is identified by
what the document declares (claim and path, image reference, repository and revision, bucket and prefix),
never by what opens it (secrets) or where a download is kept; a local folder has no stable name, so its ``config.json`` digest is used.  What only the runtime can see (torch, CPU, traced sources, the
config digest of a claim) is in the manifest as *observed* factors and compared at load.
"""

from __future__ import annotations

from typing import Any

from kerf_runtime.config import declared
from kerf_runtime.config.base import canonical_json, digest
from kerf_runtime.config.compilation import CompilationLevel
from kerf_runtime.config.custom_ops import canonical_choices
from kerf_runtime.config.deployment import LoadFormat, ModelDeploymentSpec
from kerf_runtime.config.engine import EngineConfig
from kerf_runtime.config.passes import pass_uuids

__all__ = [
    "KEY_FORMAT",
    "cache_key",
    "canonical_json",
    "compile_document",
    "declared_factors",
    "digest",
    "needs_compile_cache",
]

KEY_FORMAT = 2
"""Raised when the meaning of a factor or the layout of a cache folder changes."""


def needs_compile_cache(spec: ModelDeploymentSpec) -> bool:
    """Whether the deployment has anything to cache: only level 3 makes artifacts that can be loaded.

    Levels 1 and 2 compile in every pod, which is what one debugs them for.
    """
    return spec.compilation.level is CompilationLevel.PIECEWISE and not spec.engine.enforce_eager


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
    compilation, level = spec.compilation, spec.compilation.level
    with_passes = declared.inductor_compiles_pieces(compilation, level)
    return {
        "format": KEY_FORMAT,
        "model": (
            {"configSha256": model_config_digest}
            if model_config_digest is not None
            else spec.model.source.identity()
        )
        | _load_format(spec),
        "dtype": spec.engine.dtype.value,
        "quantization": _quantization(spec.engine),
        "level": int(level),
        "backend": compilation.backend.value,
        "splittingOps": list(declared.splitting_ops(compilation)),
        "customOps": list(declared.custom_ops(compilation, level)),
        "compileSizes": list(declared.compile_sizes(spec, level)),
        "passes": pass_uuids(declared.passes(compilation, level)) if with_passes else {},
        "inductorConfig": compilation.inductor_config or {},
        "image": image,
        "accelerator": "cpu",
    }


def cache_key(factors: dict[str, Any]) -> str:
    """First 16 hex digits of the digest of the declared factors: the name of the cache folder."""
    return digest(factors)[:16]


def _load_format(spec: ModelDeploymentSpec) -> dict[str, str]:
    """Told where it is not the default only, so that it is in no other key."""
    if spec.model.load_format is LoadFormat.AUTO:
        return {}
    return {"loadFormat": spec.model.load_format.value}


def _quantization(engine: EngineConfig) -> str | None:
    return None if engine.quantization is None else engine.quantization.value


def compile_document(spec: ModelDeploymentSpec) -> dict[str, Any]:
    """The part of ``spec`` that the compile Job needs: equal for all specs with the same cache key."""
    compilation, level = spec.compilation, spec.compilation.level
    engine: dict[str, Any] = {"dtype": spec.engine.dtype.value}
    if spec.engine.quantization is not None:
        engine["quantization"] = _quantization(spec.engine)
    compiled: dict[str, Any] = {
        "level": int(level),
        "backend": compilation.backend.value,
        "splittingOps": list(declared.splitting_ops(compilation)),
        "customOps": canonical_choices(frozenset(declared.custom_ops(compilation, level))),
        "passes": declared.passes(compilation, level).to_document(),
    }
    sizes = declared.compile_sizes(spec, level)
    if sizes:
        compiled["compileSizes"] = list(sizes)
        # The Job's own step must hold the largest size; its default may be below.
        engine["maxNumBatchedTokens"] = max(sizes[-1], EngineConfig().max_num_batched_tokens)
    if compilation.inductor_config:
        compiled["inductorConfig"] = dict(compilation.inductor_config)
    return {
        "model": {"source": spec.model.source.identity(), **_load_format(spec)},
        "engine": engine,
        "compilation": compiled,
    }
