"""Random traffic on CUDA: nothing is captured or compiled, memory stays flat, every step is accounted for.

A tenth of what ``benchmarks/traffic.py`` records.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from benchmarks.traffic import SIZES, drive, make_checkpoint, start, violations
from tests.engine.matrix import PARTS, dispatch_counts, expected_dispatch

pytestmark = pytest.mark.gpu
STEPS = 5000


@pytest.fixture(scope="module")
def model_and_cache(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("traffic")
    return make_checkpoint(folder / "model"), folder / "cache"


@pytest.mark.parametrize("mode", [mode for mode in PARTS if mode != "NONE"])
def test_random_traffic_needs_nothing_new_and_every_step_runs_as_the_rules_say(
    mode: str, model_and_cache: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = start(*model_and_cache, mode=mode)
    graphs, steps = core.engine.graphs, Counter[Any]()
    dispatch = graphs.dispatch

    def watched(num_tokens: int, uniform_decode: bool) -> Any:
        steps[expected_dispatch(mode, num_tokens, uniform_decode, SIZES)] += 1
        return dispatch(num_tokens, uniform_decode)

    monkeypatch.setattr(graphs, "dispatch", watched)
    thorough = mode == "FULL_AND_PIECEWISE"
    result = drive(core, STEPS if thorough else STEPS // 5, seed=1)
    assert list(violations(result)) == []
    assert dispatch_counts(core.report()) == steps
    assert min(result["finished"], result["aborted"]) > 0
    if thorough:
        assert result["preemptions"] > 0
    pieces = core.report()["compiled"]["capturable"]
    ran = result["dispatch"]
    assert result["counters"] == {"graph_replays": ran["FULL"] + pieces * ran["PIECEWISE"]}
    hits = [graph["hits"] for graph in core.report()["graphs"]["descriptors"]]
    assert sum(hits) == ran["FULL"] + ran["PIECEWISE"]
