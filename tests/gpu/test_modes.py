"""Every mode on CUDA at level 3 answers like mode NONE, and runs every step as the rules say.

float32: the same greedy tokens.  bfloat16: a padded batch may take another matrix kernel, which adds in
another order, so logits are compared within a tolerance, and tokens wherever the choice was not a tie.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.engine.engines import document, started
from tests.engine.matrix import ENGINE, PARTS, SIZES, Played
from tests.engine.modes import FAMILIES, check_mode, play_reference, relative_error
from tests.models.checkpoints import write_safetensors

from kerf_runtime.engine.args import EngineArgs
from kerf_runtime.engine.core import EngineCore

pytestmark = pytest.mark.gpu
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.03}
"""Of the logits of a sequence, relative to their norm."""

IN_FORCE = {("Bamba", "FULL"): "FULL_AND_PIECEWISE"}
"""What is in force instead: no graph holds the mixer of a batch with prompts."""


class Engines:
    """Starts engines of one model and data type, which is compiled by the first of them."""

    def __init__(self, folder: Path, cache: Path, family: str, dtype: str) -> None:
        self._folder, self._cache, self.family, self.dtype = folder, cache, family, dtype
        self.reference = play_reference(self.start("NONE"))

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
    return Engines(folder, tmp_path_factory.mktemp("cache"), family, dtype)


@pytest.mark.parametrize("mode", PARTS)
def test_every_batch_answers_like_mode_none_and_runs_as_the_rules_say(
    mode: str, engines: Engines
) -> None:
    core = engines.start(mode)
    report = core.report()
    assert report["cache"]["result"] == "hit"

    def compare(got: Played, expected: Played, where: str) -> None:
        assert relative_error(got, expected) <= TOLERANCE[engines.dtype], where
        if engines.dtype == "float32":
            assert got.tokens == expected.tokens, where
            return
        for token, wanted, logits in zip(got.tokens, expected.tokens, expected.logits, strict=True):
            tie = TOLERANCE[engines.dtype] * float(logits.abs().max())
            assert float(logits[wanted] - logits[token]) <= tie, where

    check_mode(core, IN_FORCE.get((engines.family, mode), mode), engines.reference, compare)
