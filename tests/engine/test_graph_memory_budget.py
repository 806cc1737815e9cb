"""An engine with too little memory for its graphs serves with those that fit, or says why it does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.engine.engines import document, engine_args, generate, started

from kerf_runtime.engine.core import EngineCore
from kerf_runtime.errors import ConfigError


def core_within(path: Path, budget: int | None, **compilation: Any) -> EngineCore:
    """A started engine whose decode graphs may hold ``budget`` bytes."""
    wanted = {"level": 0, "cudagraphMode": "FULL_DECODE_ONLY", **compilation}
    if budget is not None:
        wanted["graphMemoryBudget"] = str(budget)
    return started(replace(engine_args(path), document=document(compilation=wanted)))


@pytest.fixture(scope="module")
def unlimited(tiny_path: Path) -> EngineCore:
    return core_within(tiny_path, None)


def test_the_report_names_what_was_dropped_and_every_token_is_the_same(
    unlimited: EngineCore, tiny_path: Path, tiny_prompts: list[list[int]]
) -> None:
    budget = unlimited.report()["graphs"]["memory_bytes"] // 2
    core = core_within(tiny_path, budget)
    assert generate(core, tiny_prompts) == generate(unlimited, tiny_prompts)

    report = core.report()
    graphs, effective = report["graphs"], report["effective"]
    assert graphs["memory_bytes"] <= graphs["memory_budget_bytes"] == budget
    kept = {graph["num_tokens"] for graph in graphs["descriptors"]}
    dropped = {graph["num_tokens"] for graph in graphs["dropped"]}
    assert kept
    assert dropped
    assert kept | dropped == {1, 2, 4, 8}
    assert {graph["reason"] for graph in graphs["dropped"]} == {"MemoryBudget"}
    [change] = [c for c in effective["changes"] if c["reason"] == "MemoryBudget"]
    assert change["field"] == "captureSizes"
    assert change["requested"] == "4 graphs"
    assert change["effective"] == f"{len(kept)} graphs"
    assert "kept FULL decode 1 2" in change["message"]
    assert effective["capture_sizes"] == tuple(sorted(kept))
    assert effective["mode"] == "FULL_DECODE_ONLY"

    replayed = {row["size"] for row in report["dispatch_detail"] if row["mode"] == "FULL"}
    assert replayed <= kept
    reasons = {row["reason"] for row in report["dispatch_detail"] if row["mode"] == "NONE"}
    assert "AboveLargest" in reasons
    assert report["counters"]["captures_after_startup"] == 0


def test_without_room_for_any_graph_the_mode_in_force_is_none(tiny_path: Path) -> None:
    effective = core_within(tiny_path, 1).report()["effective"]
    assert (effective["requested_mode"], effective["mode"]) == ("FULL_DECODE_ONLY", "NONE")
    assert effective["capture_sizes"] == ()
    fields = [c["field"] for c in effective["changes"] if c["reason"] == "MemoryBudget"]
    assert fields == ["captureSizes", "cudagraphMode"]


def test_strict_refuses_to_start_without_every_graph(tiny_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"strict is set .*MemoryBudget: graphMemoryBudget is 1 bytes"
    ):
        core_within(tiny_path, 1, strict=True)
