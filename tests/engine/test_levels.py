"""Levels 1 and 2 in a whole engine, whose buffers lie in one piece of memory, answer like level 0."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engine.engines import document, generate, started
from tests.engine.families import FAMILIES
from tests.models.checkpoints import write_safetensors

from kerf_runtime.compilation.counters import compilation_counter
from kerf_runtime.engine.args import EngineArgs
from kerf_runtime.engine.core import EngineCore

PROMPTS = [[(11 * i + 5 * j) % 256 for j in range(n)] for i, n in enumerate((1, 2, 5, 17, 33, 60))]


def start(folder: Path, level: int, mode: str = "NONE", backend: str = "eager") -> EngineCore:
    compilation = {"level": level, "cudagraphMode": mode}
    if level and backend == "eager":
        compilation |= {"backend": backend, "inductorConfig": {}}
    return started(EngineArgs(document(compilation=compilation), folder, None))


@pytest.fixture(scope="module", params=FAMILIES)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[list[int]]]:
    """A checkpoint and its answers at level 0."""
    folder = write_safetensors(tmp_path_factory.mktemp("family"), FAMILIES[request.param]())
    return folder, generate(start(folder, 0), PROMPTS)


def test_level_2_traces_every_family_once_and_answers_like_level_0(
    family: tuple[Path, list[list[int]]],
) -> None:
    folder, expected = family
    with compilation_counter.expect(
        dynamo_traces=1, graphs_seen=1, backend_compilations=1, compilations_after_startup=0
    ):
        core = start(folder, 2)
        assert generate(core, PROMPTS) == expected
    assert core.report()["effective"]["level"] == 2


@pytest.mark.parametrize(
    ("level", "mode", "backend"),
    [
        (1, "NONE", "eager"),
        (1, "FULL", "eager"),
        (2, "FULL", "eager"),
        # An emulated graph sees no kernel of Inductor, and must replay them all the same.
        (2, "FULL", "inductor"),
    ],
)
def test_other_levels_modes_and_back_ends_answer_like_transformers(
    level: int,
    mode: str,
    backend: str,
    tiny_path: Path,
    tiny_prompts: list[list[int]],
    tiny_answers: list[list[int]],
) -> None:
    before = compilation_counter.snapshot()
    core = start(tiny_path, level, mode, backend)
    # Level 1 traces for the number of tokens that varies, and what follows from that; no operator's inside.
    assert compilation_counter.snapshot()["dynamo_traces"] - before["dynamo_traces"] <= 4
    assert generate(core, tiny_prompts) == tiny_answers
    with compilation_counter.expect(
        dynamo_traces=0, backend_compilations=0, captures_after_startup=0
    ):
        assert generate(core, tiny_prompts, together=False) == tiny_answers
    assert core.report()["effective"]["mode"] == mode
    assert (core.report()["dispatch"]["FULL"] > 0) is (mode == "FULL")
