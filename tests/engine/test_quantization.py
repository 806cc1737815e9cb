"""An engine that quantises on load: compiled, fused and replayed, it answers as it does eagerly."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engine.engines import document, generate, started

from kerf_runtime.compilation.counters import compilation_counter
from kerf_runtime.engine.args import EngineArgs


def fp8_args(path: Path, cache: Path | None, **compilation: object) -> EngineArgs:
    return EngineArgs(
        document=document(engine={"quantization": "fp8"}, compilation=compilation),
        model_path=path,
        cache_dir=cache,
    )


@pytest.fixture(scope="module")
def eager_answers(tiny_path: Path, tiny_prompts: list[list[int]]) -> list[list[int]]:
    core = started(fp8_args(tiny_path, None, level=0, cudagraphMode="NONE"))
    return generate(core, tiny_prompts)


def test_fused_and_replayed_the_answers_are_those_of_level_0(
    tiny_path: Path,
    compile_cache: Path,
    tiny_prompts: list[list[int]],
    eager_answers: list[list[int]],
) -> None:
    passes = {"normQuantFusion": True, "activationQuantFusion": True}
    compilation = {"level": 3, "customOps": ["all"], "passes": passes}
    args = fp8_args(tiny_path, compile_cache, **compilation)
    # A norm before the first projection, two in the middle piece, one in the last; SwiGLU in two of them.
    with compilation_counter.expect(
        inductor_compilations=3, norm_quant_matches=4, activation_quant_matches=2
    ):
        core = started(args)
    assert generate(core, tiny_prompts) == eager_answers
    with compilation_counter.expect(inductor_compilations=0, dynamo_traces=0, norm_quant_matches=0):
        warm = started(args)
    assert warm.report()["cache"]["result"] == "hit"
    assert generate(warm, tiny_prompts) == eager_answers
