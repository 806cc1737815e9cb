"""Tiny random checkpoints of every family answer as transformers does, whatever the scheduler does with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.engine.engines import GREEDY, engine_args, generate, greedy_reference, started
from tests.engine.families import FAMILIES, PROMPTS
from tests.models.checkpoints import write_safetensors

from kerf_runtime.engine.kv_cache import bytes_per_block
from kerf_runtime.engine.state_cache import state_cache_bytes
from kerf_runtime.models import read_model_config
from kerf_runtime.models.registry import supported_architectures


@pytest.fixture(scope="module", params=FAMILIES.values(), ids=FAMILIES)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[list[int]]]:
    """A folder, and what transformers answers."""
    model = request.param()
    folder = write_safetensors(tmp_path_factory.mktemp("family"), model)
    return folder, greedy_reference(model, PROMPTS, GREEDY.max_tokens)


@pytest.mark.parametrize("cached", [True, False], ids=["cache on", "cache off"])
@pytest.mark.parametrize("budget", [8, 512], ids=["chunks", "whole prompts"])
@pytest.mark.parametrize("blocks", [22, None], ids=["preempted", "room for all"])
def test_answers_are_those_of_transformers(
    checkpoint: tuple[Path, list[list[int]]], cached: bool, budget: int, blocks: int | None
) -> None:
    folder, answers = checkpoint
    limits: dict[str, Any] = {
        "prefixCaching": cached,
        "maxNumBatchedTokens": budget,
        "blockSize": 8,
    }
    config = read_model_config(folder)
    if blocks is not None:
        size = blocks * bytes_per_block(config, 8, 4) + state_cache_bytes(config, 6, 4)
        limits["kvCacheMemory"] = f"{-(-size // 1024)}Ki"
    core = started(engine_args(folder, engine=limits))
    for _ in range(2):
        assert generate(core, PROMPTS) == answers
    stats = core.stats()
    assert (stats["preemptions"] > 0) == (blocks is not None)
    # A state-space layer has nothing that could be found again.
    assert (stats["prefix_cache_hits"] > 0) == (cached and config.state_shape is None)


def test_no_family_is_left_out() -> None:
    names = {type(make()).__name__ for make in FAMILIES.values()}
    assert names == set(supported_architectures())
