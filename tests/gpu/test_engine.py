"""The engine on CUDA at levels 0 to 2: the answers of the CPU in every mode, and steps that wait for nothing else."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.engine.engines import engine_args as make_args
from tests.engine.engines import generate, greedy_reference, started
from tests.models.checkpoints import make_llama, write_safetensors

from kerf_runtime.compilation.counters import compilation_counter
from kerf_runtime.engine.messages import AddRequest, SamplingParams

pytestmark = pytest.mark.gpu
PROMPTS = [[(11 * i + 5 * j) % 320 for j in range(n)] for i, n in enumerate((1, 2, 5, 16, 40, 90))]
COUNT = 16
PENALISED = SamplingParams(
    max_tokens=COUNT, ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.5, logprobs=2
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    model = make_llama()
    folder = write_safetensors(tmp_path_factory.mktemp("tiny"), model)
    return folder, greedy_reference(model, PROMPTS, COUNT)


@pytest.mark.parametrize("mode", ["NONE", "FULL", "FULL_DECODE_ONLY"])
def test_every_mode_answers_like_the_cpu(mode: str, tiny: tuple[Path, list[list[int]]]) -> None:
    folder, answers = tiny
    core = started(make_args(folder, mode=mode))
    report = core.report()
    assert report["effective"]["platform"]["name"] == "cuda"
    assert report["graphs"]["backend"] == "cuda"
    graphs = {"NONE": 0, "FULL": 9, "FULL_DECODE_ONLY": 4}[mode]
    assert report["graphs"]["captured"] == graphs
    assert all(graph["nodes"] > 20 for graph in report["graphs"]["descriptors"])
    with compilation_counter.expect(graphs_captured=0, captures_after_startup=0):
        assert generate(core, PROMPTS) == answers
        assert generate(core, PROMPTS[:2], together=False) == answers[:2]
    totals = core.report()["dispatch"]
    assert (totals["FULL"] > 0) is (mode != "NONE")


@pytest.mark.parametrize(("level", "mode"), [(1, "NONE"), (1, "FULL"), (2, "NONE"), (2, "FULL")])
def test_levels_1_and_2_answer_like_the_cpu(
    level: int, mode: str, tiny: tuple[Path, list[list[int]]]
) -> None:
    folder, answers = tiny
    core = started(make_args(folder, level=level, mode=mode))
    assert core.report()["effective"]["level"] == level
    assert core.report()["effective"]["mode"] == mode
    assert generate(core, PROMPTS) == answers
    with compilation_counter.expect(
        dynamo_traces=0, inductor_compilations=0, graphs_captured=0, captures_after_startup=0
    ):
        assert generate(core, PROMPTS) == answers
    assert (core.report()["dispatch"]["FULL"] > 0) is (mode == "FULL")


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=8, ignore_eos=True),
        SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.8, top_k=20, top_p=0.9, seed=1),
        PENALISED,
    ],
    ids=["greedy", "filtered", "penalised"],
)
def test_a_step_waits_for_the_tokens_of_the_one_before_and_for_nothing_else(
    params: SamplingParams, tiny: tuple[Path, list[list[int]]]
) -> None:
    core = started(make_args(tiny[0], mode="FULL"))
    for number, prompt in enumerate(PROMPTS[:3]):
        core.add(AddRequest(str(number), list(prompt), params))
    core.step()
    core.step()
    before = core.stats()["overlapped_steps"]
    torch.cuda.set_sync_debug_mode("warn")
    try:
        for _ in range(3):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                core.step()
            waits = [str(w.message) for w in caught if "synchronizing" in str(w.message)]
            assert not waits, [f"{w.filename}:{w.lineno}" for w in caught]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert core.stats()["overlapped_steps"] == before + 3


def test_overlapping_steps_give_the_tokens_of_single_ones(
    tiny: tuple[Path, list[list[int]]],
) -> None:
    folder, answers = tiny
    penalised = []
    for overlap in (False, True):
        core = started(make_args(folder, mode="FULL_DECODE_ONLY"), overlap=overlap)
        assert generate(core, PROMPTS) == answers
        penalised.append(generate(core, PROMPTS, PENALISED))
        assert (core.stats()["overlapped_steps"] > 0) is overlap
    assert penalised[0] == penalised[1] != answers


def test_tokens_are_fed_to_their_requests_when_priorities_change_the_order(
    tiny: tuple[Path, list[list[int]]],
) -> None:
    folder, answers = tiny
    core = started(make_args(folder, mode="FULL_DECODE_ONLY"))
    params = SamplingParams(max_tokens=COUNT, ignore_eos=True)
    found: list[list[int]] = [[] for _ in PROMPTS]
    waiting = list(enumerate(PROMPTS))
    while waiting or core.has_work:
        # Two at a time: one that everybody before it has to make room for, and one that has to wait.
        for number, prompt in waiting[:2]:
            core.add(AddRequest(str(number), list(prompt), params, priority=number % 2))
        del waiting[:2]
        for output in core.step():
            found[int(output.request_id)] += output.token_ids
    assert found == answers
    assert core.stats()["overlapped_steps"] > 0


def test_inputs_that_were_not_copied_yet_are_not_written_over(
    tiny: tuple[Path, list[list[int]]],
) -> None:
    folder, answers = tiny
    limits = {"maxNumBatchedTokens": 8, "maxNumSeqs": 4, "prefixCaching": False}
    core = started(make_args(folder, mode="NONE", engine=limits))
    # The first eleven of twelve chunks give no token that would be waited for.
    torch.cuda._sleep(2_000_000_000)
    assert generate(core, [PROMPTS[-1]]) == [answers[-1]]
