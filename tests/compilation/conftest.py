"""Compiled models for the tests of this folder."""

from __future__ import annotations

import pytest
from tests.compilation.shared import ColdCompile, already_compiled, deep_llama


@pytest.fixture(scope="session")
def cold() -> ColdCompile:
    """A 30-layer Llama that was compiled into an empty cache; read only."""
    return deep_llama()


@pytest.fixture
def tiny_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """``prepare`` finds the compilation of ``tiny(1)`` done; everything else is real."""
    monkeypatch.setattr("kerf_runtime.compilation.compiler.compile_model", already_compiled)
