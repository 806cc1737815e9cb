"""Overlapping steps: each is enqueued before the tokens of the one before are known, and nobody can tell.

On a CPU a step has run when it was enqueued, so that the order of everything is tested here, and the
waiting on a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.engine.engines import document as deployment
from tests.engine.engines import engine_args, generate, run, started

from kerf_runtime.engine.args import EngineArgs
from kerf_runtime.engine.core import EngineCore
from kerf_runtime.engine.messages import AddRequest, SamplingParams, TokenLogprobs, TokenOutput

TIGHT = {"blockSize": 4, "kvCacheMemory": "100Ki"}
"""So few blocks that requests lose theirs."""


def pair(path: Path, **options: Any) -> tuple[EngineCore, EngineCore]:
    """Two engines that differ in one thing: the second overlaps its steps."""
    args = engine_args(path, **options)
    return started(args, overlap=False), started(args, overlap=True)


@pytest.fixture(scope="module", params=["roomy", "tight"])
def engines(request: pytest.FixtureRequest, tiny_path: Path) -> tuple[EngineCore, EngineCore]:
    return pair(
        tiny_path, mode="FULL_DECODE_ONLY", engine=TIGHT if request.param == "tight" else None
    )


def requests(seed: int, count: int) -> list[AddRequest]:
    """Of every kind: greedy and not, with penalties, priorities, log probabilities and early ends."""
    chance = random.Random(seed)
    made = []
    for index in range(count):
        logprobs = chance.choice([None, None, 2])
        params = SamplingParams(
            max_tokens=chance.randint(1, 24),
            temperature=chance.choice([0.0, 0.0, 0.8]),
            top_k=chance.choice([0, 0, 5]),
            seed=index,
            presence_penalty=chance.choice([0.0, 0.0, 0.0, 0.7]),
            frequency_penalty=chance.choice([0.0, 0.0, 0.0, 0.4]),
            repetition_penalty=chance.choice([1.0, 1.0, 1.0, 1.3]),
            logprobs=logprobs,
            prompt_logprobs=logprobs is not None and chance.random() < 0.5,
            min_tokens=chance.choice([0, 0, 3]),
            logit_bias=chance.choice([(), ((5, 3.0),)]),
            stop_token_ids=tuple(range(chance.choice([0, 60]))),
            ignore_eos=True,
        )
        prompt = [chance.randrange(320) for _ in range(chance.randint(1, 40))]
        priority = chance.choice([0, 0, -1, 1])
        made.append(AddRequest(f"{seed}-{index}", prompt, params, priority))
    return made


def play(core: EngineCore, wanted: list[AddRequest]) -> dict[str, list[TokenOutput]]:
    """All outputs of each request; they arrive three per step."""
    waiting = list(wanted)
    found: dict[str, list[TokenOutput]] = {request.request_id: [] for request in wanted}
    while waiting or core.has_work:
        for request in waiting[:3]:
            core.add(request)
        del waiting[:3]
        for output in core.step():
            found[output.request_id].append(output)
    return found


def values(entries: Sequence[TokenLogprobs | None] | None) -> list[float]:
    """Log probabilities; the first token of a prompt has none."""
    return [entry.logprob for entry in entries or () if entry is not None]


@pytest.mark.parametrize("seed", range(4))
def test_every_token_reason_and_log_probability_is_the_same(
    seed: int, engines: tuple[EngineCore, EngineCore]
) -> None:
    plain, overlapping = engines
    before = overlapping.stats()["overlapped_steps"]
    expected = play(plain, requests(seed, 14))
    found = play(overlapping, requests(seed, 14))
    for name, outputs in expected.items():
        got = found[name]
        assert [o.token_ids for o in got] == [o.token_ids for o in outputs], name
        assert [o.finish_reason for o in got] == [o.finish_reason for o in outputs], name
        for mine, theirs in zip(got, outputs, strict=True):
            for field in ("logprobs", "prompt_logprobs"):
                told, reference = getattr(mine, field), getattr(theirs, field)
                assert (told is None) == (reference is None)
                assert values(told) == pytest.approx(values(reference), abs=1e-4)
    assert overlapping.stats()["overlapped_steps"] > before
    assert plain.stats()["overlapped_steps"] == 0
    for core in engines:
        assert core.stats()["kv_blocks_used"] == 0
        assert core.stats()["requests_running"] == core.stats()["requests_waiting"] == 0


def test_blocks_were_taken_away_where_they_are_few(
    engines: tuple[EngineCore, EngineCore],
) -> None:
    few = engines[0].engine.scheduler.limits.block_size == TIGHT["blockSize"]
    # As many as run at once, each of which ends up with a fifth of all blocks and more.
    long = SamplingParams(max_tokens=60, ignore_eos=True)
    wanted = [AddRequest(f"long {row}", [row + 1, *range(40)], long) for row in range(6)]
    for core in engines:
        play(core, wanted)
        assert (core.stats()["preemptions"] > 0) is few


def test_the_first_step_gives_nothing_and_every_later_one_the_tokens_of_the_one_before(
    tiny_path: Path,
) -> None:
    _, core = pair(tiny_path)
    core.add(AddRequest("a", [1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True)))
    assert core.step() == []
    assert [len(output.token_ids) for output in core.step()] == [1]
    assert core.has_work
    assert [len(output.token_ids) for output in core.step()] == [1]
    # The third token is on its way, and no step after it is needed.
    [last] = core.step()
    assert last.finish_reason == "length"
    assert not core.has_work
    assert core.stats()["dispatch"] == [["NONE", 0, "ModeNone", 3]]


def test_tokens_are_fed_to_their_requests_when_priorities_change_the_order(
    tiny_path: Path,
) -> None:
    plain, core = pair(tiny_path)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    # Rows of a step with two new prompts: first, third, second, fourth.  Of the next step: in order.
    early = [AddRequest("first", [1, 2], params, 0), AddRequest("third", [3, 4], params, 1)]
    late = [AddRequest("second", [5, 6], params, 0), AddRequest("fourth", [7, 8], params, 1)]
    expected = run(plain, [*early, *late])
    found: dict[str, list[int]] = {request.request_id: [] for request in (*early, *late)}
    for requests_of_step in (early, [], late):
        for request in requests_of_step:
            core.add(request)
        for output in core.step():
            found[output.request_id] += output.token_ids
    while core.has_work:
        for output in core.step():
            found[output.request_id] += output.token_ids
    assert found == expected


def test_a_request_that_ends_early_wastes_one_row_and_nothing_else(tiny_path: Path) -> None:
    plain, core = pair(tiny_path)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    [answer] = generate(plain, [[1, 2, 3]], params)
    stop = SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=(answer[4],))
    length = answer.index(answer[4]) + 1
    assert generate(core, [[1, 2, 3]], stop) == [answer[:length]]
    steps = sum(count for *_, count in core.stats()["dispatch"])
    assert steps == length + 1
    assert core.stats()["generation_tokens"] == length


def test_an_abort_between_enqueueing_and_reading_leaves_nothing(tiny_path: Path) -> None:
    _, core = pair(tiny_path)
    core.add(AddRequest("a", [1, 2, 3], SamplingParams(max_tokens=9, ignore_eos=True)))
    core.add(AddRequest("b", [4, 5], SamplingParams(max_tokens=9, ignore_eos=True)))
    core.step()
    core.abort("a")
    assert [output.request_id for output in core.step()] == ["b"]
    core.abort("b")
    assert core.has_work  # a step is in flight
    assert core.step() == []
    assert not core.has_work
    assert core.stats()["kv_blocks_used"] == 0


def test_steps_of_requests_with_penalties_overlap_and_count_the_token_on_its_way(
    engines: tuple[EngineCore, EngineCore],
) -> None:
    params = SamplingParams(
        max_tokens=20, repetition_penalty=1.5, frequency_penalty=1.0, ignore_eos=True
    )
    plain, overlapping = engines
    before = overlapping.stats()["overlapped_steps"]
    answers = [generate(core, [[1, 2, 3], [4]], params) for core in (plain, overlapping)]
    assert answers[0] == answers[1]
    assert overlapping.stats()["overlapped_steps"] - before == 20


def test_decode_steps_from_full_graphs_do_not_call_the_output_layer(tiny_path: Path) -> None:
    core = started(engine_args(tiny_path, mode="FULL_DECODE_ONLY"), overlap=True)
    calls: list[int] = []
    head: Any = core.engine.prepared.model.lm_head
    hook = head.register_forward_hook(lambda _, inputs, __: calls.append(len(inputs[0])))
    generate(core, [[1, 2, 3], [4, 5], [6]])
    hook.remove()
    assert core.stats()["dispatch"][0][:3] == ["FULL", 4, "Padded"]
    assert calls == [3]  # the prompts


def test_a_prompt_in_pieces_of_one_token_looks_like_decode_and_its_rows_are_told_apart(
    tiny_path: Path,
) -> None:
    prompts = [[1], [2], [3], list(range(10, 24))]
    limits = {"maxNumBatchedTokens": 4, "maxNumSeqs": 4}
    found = []
    for mode in ("NONE", "FULL_DECODE_ONLY"):
        graphs = {"level": 0, "cudagraphMode": mode, "captureSizes": [1, 2, 4]}
        document = deployment(engine=limits, compilation=graphs)
        core = started(EngineArgs(document, tiny_path, None), overlap=True)
        found.append(generate(core, prompts))
    mixed = [entry for entry in core.stats()["dispatch"] if entry[0] == "NONE"]
    assert mixed == []
    assert found[0] == found[1]
