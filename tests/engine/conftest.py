"""A tiny random Llama, its answers by transformers, and a compile cache, shared by a test session."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engine.engines import greedy_reference
from tests.models.checkpoints import make_llama, write_safetensors
from transformers import LlamaForCausalLM

TINY_PROMPTS = [
    [(11 * i + 5 * j) % 320 for j in range(n)] for i, n in enumerate((1, 2, 5, 16, 17, 40, 90, 33))
]


@pytest.fixture(scope="session")
def tiny_model() -> LlamaForCausalLM:
    """Three layers, random weights."""
    return make_llama()


@pytest.fixture(scope="session")
def tiny_path(tiny_model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a safetensors folder."""
    return write_safetensors(tmp_path_factory.mktemp("tiny"), tiny_model)


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One compile cache for all engines of the session: every model is compiled once."""
    return tmp_path_factory.mktemp("compile-cache")


@pytest.fixture(scope="session")
def tiny_prompts() -> list[list[int]]:
    """Prompts of one token to several chunks."""
    return TINY_PROMPTS


@pytest.fixture(scope="session")
def tiny_answers(tiny_model: LlamaForCausalLM, tiny_prompts: list[list[int]]) -> list[list[int]]:
    """16 greedy tokens for every tiny prompt, by transformers."""
    return greedy_reference(tiny_model, tiny_prompts, 16)
