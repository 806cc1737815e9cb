"""The comparison that GPU tests rest on passes for an engine as it is, and fails for one that is subtly wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.engine.accuracy import (
    Reference,
    Schedule,
    ask_twice,
    check_bfloat16,
    check_float32,
    check_schedules,
    compare,
    round_weights,
    schedules,
    with_schedule,
)
from tests.engine.engines import engine_args, started
from tests.engine.families import FAMILIES, GPU_OPTIONS, PROMPTS
from tests.models.checkpoints import make_llama, write_safetensors

from kerf_runtime.engine.core import EngineCore

HARDEST = Schedule(cached=True, chunked=True, preempted=True)


def model(**changes: Any) -> Any:
    return round_weights(FAMILIES["Mistral"](**{**GPU_OPTIONS["Mistral"], **changes}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_safetensors(tmp_path_factory.mktemp("mistral"), model())


def start(folder: Path, dtype: str) -> EngineCore:
    limits = {"dtype": dtype, "maxNumBatchedTokens": 512}
    # Tokens come a step later, as on a GPU.
    return started(engine_args(folder, engine=limits), overlap=True)


@pytest.fixture(scope="module")
def rounded(folder: Path) -> EngineCore:
    return start(folder, "bfloat16")


def test_an_engine_in_float32_answers_as_transformers(folder: Path) -> None:
    core = start(folder, "float32")
    check_schedules(core, PROMPTS, Reference(model()), check_float32, [HARDEST])


def test_an_engine_in_bfloat16_is_within_tolerance_and_a_wrong_one_is_not(
    rounded: EngineCore,
) -> None:
    told = ask_twice(with_schedule(rounded, HARDEST), PROMPTS, top=320)
    reference = Reference(model())
    found = compare(told, reference)
    check_bfloat16(found, "as it is")
    assert found.rows == sum(len(one.logprobs) for one in told)
    with pytest.raises(AssertionError, match="float32"):
        check_float32(found, "float32")
    wider = compare(told, Reference(model(sliding_window=29)))
    with pytest.raises(AssertionError, match="a window of one token more"):
        check_bfloat16(wider, "a window of one token more")
    order = [1, 0, *range(2, len(told[0].ids))]
    swapped = replace(told[0], ids=told[0].ids[order], logprobs=told[0].logprobs[order])
    with pytest.raises(AssertionError, match="two tokens in the other order"):
        check_bfloat16(compare([swapped, *told[1:]], reference), "two tokens in the other order")


def test_every_schedule_is_among_them_and_none_that_a_model_cannot_have(
    rounded: EngineCore,
) -> None:
    names = [str(schedule) for schedule in schedules(rounded)]
    assert len(set(names)) == 8
    assert str(HARDEST) == "cached, chunked, preempted"
    assert str(HARDEST) in names


def test_every_family_has_options_for_a_gpu() -> None:
    assert GPU_OPTIONS.keys() == FAMILIES.keys()


def test_a_model_is_rounded_in_its_weights_and_not_in_its_tables() -> None:
    model, exact = round_weights(make_llama()), make_llama()
    weight = exact.lm_head.weight
    assert model.lm_head.weight.equal(weight.bfloat16().float())
    assert not model.lm_head.weight.equal(weight)
    assert model.model.rotary_emb.inv_freq.equal(exact.model.rotary_emb.inv_freq)
