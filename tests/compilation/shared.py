"""What is compiled once for the whole session; Inductor takes seconds per piece.

``deep_llama`` is a Llama of 30 layers compiled cold into a cache that nobody changes; ``tiny_artifact``
is the compiled form of a one-layer ``Tiny``.  Both are module-level memos, so that the conftest files
of several folders share one compilation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tests.compilation.graphs import ATTENTION
from tests.compilation.helpers import QUICK, open_cache, prepare
from tests.compilation.models import llama, tiny

from kerf_runtime.cache import CacheSession
from kerf_runtime.compilation.compiler import CompiledModel, CompileOptions, compile_model
from kerf_runtime.compilation.counters import compilation_counter
from kerf_runtime.compilation.prepare import PreparedModel
from kerf_runtime.models.loader import LoadedModel

DEEP = "llama-30"
"""The digest that stands for the deep Llama's configuration in its cache key."""


@dataclass(frozen=True)
class ColdCompile:
    """A model that was compiled and published, and what that took."""

    root: Path
    loaded: LoadedModel
    cache: CacheSession
    prepared: PreparedModel
    counters: dict[str, int]
    progress: list[tuple[str, str, float | None]]


@cache
def _folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="kerf-tests-")


@cache
def deep_llama() -> ColdCompile:
    """A 30-layer Llama, compiled into an empty cache."""
    root = Path(_folder().name) / "deep"
    loaded, session = llama(30), open_cache(root, DEEP)
    progress: list[tuple[str, str, float | None]] = []
    before = compilation_counter.snapshot()
    prepared = prepare(loaded, session, digest=DEEP, progress=lambda *step: progress.append(step))
    after = compilation_counter.snapshot()
    counters = {name: after[name] - before[name] for name in after}
    return ColdCompile(root, loaded, session, prepared, counters, progress)


def warm_deep_llama() -> PreparedModel:
    """The deep Llama from its cache, for tests that wrap its pieces."""
    cold = deep_llama()
    return prepare(cold.loaded, open_cache(cold.root, DEEP, read_only=True), digest=DEEP)


@cache
def tiny_artifact() -> CompiledModel:
    """``tiny(1)``, compiled: for tests of what happens around a compilation."""
    return compile_model(
        tiny(1).model,
        CompileOptions(ATTENTION, inductor=dict(QUICK)),
        device=torch.device("cpu"),
        progress=lambda *_: None,
    )


def already_compiled(*args: Any, progress: Callable[..., None], **kwargs: Any) -> CompiledModel:
    """In place of ``compile_model``: the result is there, the steps are reported."""
    for phase in ("trace", "split", "compile"):
        progress(phase, "", None)
    return tiny_artifact()
