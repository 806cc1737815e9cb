"""Every mode on emulated graphs at level 3 answers like mode NONE, and runs every step as the rules say."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engine.engines import document, started
from tests.engine.matrix import ENGINE, PARTS, SIZES, Played
from tests.engine.modes import FAMILIES, check_mode, play_reference, relative_error
from tests.models.checkpoints import write_safetensors

from kerf_runtime.engine.args import EngineArgs
from kerf_runtime.engine.core import EngineCore


def start(folder: Path, mode: str) -> EngineCore:
    """With pieces that are run as they were traced: what is tested is what happens around them."""
    compilation = {
        "level": 3,
        "backend": "eager",
        "inductorConfig": {},
        "cudagraphMode": mode,
        "captureSizes": list(SIZES),
    }
    return started(EngineArgs(document(engine=ENGINE, compilation=compilation), folder, None))


@pytest.fixture(scope="module", params=FAMILIES)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[list[Played]]]:
    """A checkpoint and what it answers in mode NONE."""
    folder = write_safetensors(tmp_path_factory.mktemp("model"), FAMILIES[request.param]())
    return folder, play_reference(start(folder, "NONE"))


@pytest.mark.parametrize("mode", PARTS)
def test_every_batch_answers_like_mode_none_and_runs_as_the_rules_say(
    mode: str, model: tuple[Path, list[list[Played]]]
) -> None:
    folder, references = model

    def compare(got: Played, expected: Played, where: str) -> None:
        assert relative_error(got, expected) <= 1e-5, where
        assert got.tokens == expected.tokens, where

    check_mode(start(folder, mode), mode, references, compare)
