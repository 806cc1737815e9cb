"""Observed factors: what only a running process can know about the validity of compiled code.

Computed without Dynamo or Inductor, so that a warm start can compare them cheaply.  Contents count,
paths do not: the same sources in another folder are the same factor.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kerf_runtime.cache.manifest import file_sha256
from kerf_runtime.config.key import digest
from kerf_runtime.platforms.interface import Platform

__all__ = ["observed_factors", "parameter_fingerprint", "source_digests"]

_OWN_SOURCES = (
    "kerf_runtime.compilation.artifact",
    "kerf_runtime.compilation.backends.inductor",
    "kerf_runtime.compilation.launch",
    "kerf_runtime.compilation.loader",
    "kerf_runtime.compilation.piecewise",
    "kerf_runtime.compilation.plan",
    "kerf_runtime.compilation.planner",
)
"""Modules of ours that define what the stored artifact means."""


def parameter_fingerprint(model: nn.Module) -> str:
    """Digest of names, shapes, strides and dtypes of all parameters and buffers."""
    state = [*model.named_parameters(), *model.named_buffers()]
    return digest([[name, list(t.shape), list(t.stride()), str(t.dtype)] for name, t in state])


def source_digests(modules: Iterable[str]) -> dict[str, str]:
    """sha256 of the source file of each dotted module name; ``missing`` where there is none."""
    return {name: _source_digest(name) for name in sorted(set(modules))}


def _source_digest(name: str) -> str:
    """Digest of a module's source, found below its top-level package without importing its parents."""
    top, _, rest = name.partition(".")
    spec = importlib.util.find_spec(top)
    if spec is None:
        return "missing"
    if not rest:
        candidates = [Path(spec.origin)] if spec.origin is not None else []
    else:
        # A package may be spread over several folders (a namespace package has no __init__.py).
        folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
        bases = [folder.joinpath(*rest.split(".")) for folder in folders]
        candidates = [p for b in bases for p in (b / "__init__.py", b.parent / f"{b.name}.py")]
    found = next((path for path in candidates if path.is_file()), None)
    return "missing" if found is None else file_sha256(found)


def observed_factors(
    model: nn.Module,
    *,
    platform: Platform,
    model_config_digest: str,
    sources: Iterable[str],
    dtype: str,
) -> dict[str, Any]:
    """All observed factors, ready to be stored or compared.

    Args:
        model: gives the parameter fingerprint.
        platform: gives the facts about the machine.
        model_config_digest: digest of the checkpoint's architecture facts.
        sources: dotted names of the traced modules.
        dtype: effective data type.
    """
    return {
        "torch": torch.__version__,
        "triton": _version("triton"),
        "platform": platform.observed_factors(),
        "dtype": dtype,
        "modelConfig": model_config_digest,
        "parameters": parameter_fingerprint(model),
        "sources": source_digests([*sources, *_OWN_SOURCES]),
    }


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"
