"""A hybrid of attention and state-space layers in the engine: whose state is whose, whatever happens to requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.engines import engine_args, generate, greedy_continuations, run, started
from tests.models.checkpoints import make_bamba, write_safetensors
from transformers import BambaForCausalLM

from kerf_runtime.compilation.counters import compilation_counter
from kerf_runtime.engine.core import EngineCore
from kerf_runtime.engine.messages import AddRequest, SamplingParams
from kerf_runtime.engine.state_cache import PADDING_SLOT
from kerf_runtime.errors import ConfigError

ROOMY: dict[str, Any] = {}
TIGHT = {"blockSize": 4, "kvCacheMemory": "260Ki"}
"""Seven slots of states take 220416 bytes, and what is left are 44 blocks: requests lose theirs."""


@pytest.fixture(scope="module")
def model() -> BambaForCausalLM:
    return make_bamba()


@pytest.fixture(scope="module")
def path(model: BambaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_safetensors(tmp_path_factory.mktemp("hybrid"), model)


@pytest.fixture(scope="module", params=[False, True], ids=["one by one", "overlapping"])
def core(request: pytest.FixtureRequest, path: Path) -> EngineCore:
    """Level 0, full graphs of every size for decode batches."""
    return started(engine_args(path, mode="FULL_DECODE_ONLY"), overlap=request.param)


def assert_answers(
    core: EngineCore, model: BambaForCausalLM, prompts: list[list[int]], **options: Any
) -> None:
    answers = generate(core, prompts, **options)
    assert {len(answer) for answer in answers} == {16}
    assert greedy_continuations(model, prompts, answers) == answers


@pytest.mark.parametrize("together", [True, False], ids=["batched", "alone"])
def test_answers_are_those_of_transformers_with_prompts_in_chunks(
    core: EngineCore, model: BambaForCausalLM, tiny_prompts: list[list[int]], together: bool
) -> None:
    # Prompts of up to 90 tokens, 48 tokens a step, 8 requests for 6 slots.
    assert_answers(core, model, tiny_prompts, together=together)
    assert core.stats()["kv_blocks_used"] == core.stats()["preemptions"] == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_that_lost_their_blocks_start_again_from_no_state(
    path: Path, model: BambaForCausalLM, overlap: bool
) -> None:
    core = started(engine_args(path, engine=TIGHT), overlap=overlap)
    prompts = [[(7 * i + 3 * j) % 320 for j in range(20 + i)] for i in range(8)]
    assert_answers(core, model, prompts)
    assert core.stats()["preemptions"] > 0


def test_a_slot_is_free_again_when_its_request_is_aborted_or_over(
    core: EngineCore, model: BambaForCausalLM, tiny_prompts: list[list[int]]
) -> None:
    scheduler = core.engine.scheduler
    for index, prompt in enumerate(tiny_prompts):
        core.add(AddRequest(f"gone-{index}", prompt, SamplingParams(max_tokens=30)))
    for _ in range(3):
        core.step()
    owned = [request.state_slot for request in scheduler._running]
    assert len(owned) == len(set(owned)) == 6
    assert set(owned) == set(range(1, 7))
    for index in range(len(tiny_prompts)):
        core.abort(f"gone-{index}")
    assert_answers(core, model, tiny_prompts)
    assert sorted(scheduler._free_slots) == list(range(1, 7))


def test_a_request_that_ends_while_its_next_step_runs_harms_nobody(
    path: Path, model: BambaForCausalLM
) -> None:
    core = started(engine_args(path, engine={"maxNumSeqs": 1}), overlap=True)
    [[first]] = generate(core, [[1, 2, 3]], SamplingParams(max_tokens=1, ignore_eos=True))
    stops = SamplingParams(max_tokens=9, stop_token_ids=(first,), ignore_eos=True)
    goes_on = SamplingParams(max_tokens=9, ignore_eos=True)
    answers = run(core, [AddRequest("a", [1, 2, 3], stops), AddRequest("b", [4, 5], goes_on)])
    assert answers["a"] == [first]
    assert greedy_continuations(model, [[4, 5]], [answers["b"]]) == [answers["b"]]


def test_batches_that_are_made_up_change_only_the_state_of_padding(core: EngineCore) -> None:
    engine = core.engine
    core.add(AddRequest("a", [1, 2, 3], SamplingParams(max_tokens=30, ignore_eos=True)))
    core.step()
    states = [state for layer in engine.runner.states.values() for state in layer]
    before = [state.clone() for state in states]
    assert len(states) == 2 * 3
    for tokens in (1, 8):
        for uniform in (True, False):
            decision = engine.graphs.dispatch(tokens, uniform)
            batch = engine.runner.make_dummy_batch(decision.descriptor)
            engine.graphs.run(decision, *batch)
    core.abort("a")
    changed = {
        slot
        for state, old in zip(states, before, strict=True)
        for slot in range(len(state))
        if not torch.equal(state[slot], old[slot])
    }
    assert changed == {PADDING_SLOT}


def test_prefix_caching_is_off_and_the_reason_is_told(core: EngineCore) -> None:
    report = core.report()["effective"]
    assert report["prefix_caching"] is False
    [change] = report["changes"]
    assert (change["field"], change["reason"]) == ("prefixCaching", "StateSpaceLayers")
    assert core.stats()["prefix_cache_queries"] == core.stats()["kv_blocks_cached"] == 0


def test_the_mixer_is_cut_out_although_the_document_does_not_know_the_model(path: Path) -> None:
    args = engine_args(path, level=3, mode="FULL_AND_PIECEWISE")
    args.document["spec"]["compilation"] |= {"backend": "eager", "inductorConfig": {}}
    with compilation_counter.expect(
        graphs_seen=1, dynamo_traces=1, pieces_seen=9, capturable_pieces_seen=5
    ):
        report = started(args).report()
    assert report["effective"]["splitting_ops"] == ("kerf::attention", "kerf::mamba_mixer")
    assert report["compiled"]["capturable"] == 5


def test_memory_too_small_for_the_states_is_refused_with_what_is_needed(path: Path) -> None:
    with pytest.raises(ConfigError, match="with the states of maxNumSeqs 6 requests") as caught:
        started(engine_args(path, engine={"kvCacheMemory": "100Ki"}))
    assert "or lower maxNumSeqs" in str(caught.value)
