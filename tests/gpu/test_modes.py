"""Every mode on CUDA at level 3 answers like mode NONE, and runs every step as the rules say.

float32: the same greedy tokens.  bfloat16: a padded batch may take another matrix kernel, which adds in
another order, so logits are compared within a tolerance, and tokens wherever the choice was not a tie.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.engine.engines import document, started
from tests.engine.matrix import (
    CAPTURED,
    ENGINE,
    PARTS,
    SIZES,
    Played,
    cases,
    dispatch_counts,
    expected_dispatch,
    play,
)
from tests.models.checkpoints import make_llama, make_random, write_safetensors
from transformers import OPTConfig, OPTForCausalLM

from kerf_runtime.compilation.counters import compilation_counter
from kerf_runtime.engine.args import EngineArgs
from kerf_runtime.engine.core import EngineCore

pytestmark = pytest.mark.gpu
HEADS_OF_64 = {"hidden_size": 128, "num_attention_heads": 2}
CASES = tuple(cases())
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.03}
"""Of the logits of a sequence, relative to their norm."""


def make_opt() -> OPTForCausalLM:
    options: dict[str, Any] = {
        "ffn_dim": 96,
        "num_hidden_layers": 3,
        "vocab_size": 320,
        "max_position_embeddings": 256,
    }
    return make_random(OPTForCausalLM, OPTConfig(**options, **HEADS_OF_64))


def make_tiny_llama() -> Any:
    return make_llama(num_key_value_heads=1, **HEADS_OF_64)


FAMILIES = {"Llama": make_tiny_llama, "OPT": make_opt}


class Engines:
    """Starts engines of one model and data type, which is compiled by the first of them."""

    def __init__(self, folder: Path, cache: Path, dtype: str) -> None:
        self._folder, self._cache, self.dtype = folder, cache, dtype
        core = self.start("NONE")
        self.reference = [play(core, case) for case in CASES]

    def start(self, mode: str) -> EngineCore:
        compilation = {"level": 3, "cudagraphMode": mode, "captureSizes": list(SIZES)}
        settings = document(engine={**ENGINE, "dtype": self.dtype}, compilation=compilation)
        return started(EngineArgs(settings, self._folder, self._cache))


@pytest.fixture(
    scope="module",
    params=[(family, dtype) for family in FAMILIES for dtype in TOLERANCE],
    ids=lambda value: " ".join(value),
)
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    family, dtype = request.param
    folder = write_safetensors(tmp_path_factory.mktemp("model"), FAMILIES[family]())
    return Engines(folder, tmp_path_factory.mktemp("cache"), dtype)


@pytest.mark.parametrize("mode", PARTS)
def test_every_batch_answers_like_mode_none_and_runs_as_the_rules_say(
    mode: str, engines: Engines
) -> None:
    core = engines.start(mode)
    report = core.report()
    assert report["cache"]["result"] == "hit"
    assert report["effective"]["mode"] == mode
    assert report["graphs"]["captured"] == CAPTURED[mode]
    before = compilation_counter.snapshot()
    steps: Counter[Any] = Counter()
    for case, reference in zip(CASES, engines.reference, strict=True):
        for step, got, expected in zip(
            case.steps, play(core, case, reference), reference, strict=True
        ):
            steps[expected_dispatch(mode, step.tokens, step.uniform)] += 1
            compare(got, expected, engines.dtype, f"{case.name}, {step.tokens} tokens")
    assert dispatch_counts(core.report()) == steps
    after = compilation_counter.snapshot()
    changed = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert changed == replays(steps, report["compiled"]["capturable"])


def replays(steps: Counter[Any], pieces: int) -> dict[str, int]:
    """The counters that steps may change: one replay for a full graph, one for each piece."""
    per_step = {"FULL": 1, "PIECEWISE": pieces, "NONE": 0}
    count = sum(number * per_step[mode] for (mode, _, _), number in steps.items())
    return {"graph_replays": count} if count else {}


def compare(got: Played, expected: Played, dtype: str, where: str) -> None:
    error = (got.logits - expected.logits).norm(dim=-1) / expected.logits.norm(dim=-1)
    assert float(error.max()) <= TOLERANCE[dtype], where
    if dtype == "float32":
        assert got.tokens == expected.tokens, where
        return
    for token, wanted, logits in zip(got.tokens, expected.tokens, expected.logits, strict=True):
        tie = TOLERANCE[dtype] * float(logits.abs().max())
        assert float(logits[wanted] - logits[token]) <= tie, where
