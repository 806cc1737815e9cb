"""Answers do not depend on what is in the KV cache already, however prompts are cut and blocks run out."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engine.engines import GREEDY, engine_args, generate, greedy_reference, run, started
from transformers import LlamaForCausalLM

from kerf_runtime.engine.core import EngineCore
from kerf_runtime.engine.messages import AddRequest, SamplingParams

COMMON = [(7 * i * i + 3) % 320 for i in range(90)]
PROMPTS = [
    *(COMMON[:length] for length in (20, 64, 65, 90)),
    [*COMMON[:40], *[9] * 30],
    [*COMMON[:40], *[9] * 20, 5],
    [*COMMON[1:60]],
    COMMON[:64],
]
"""Prompts that share whole blocks, parts of blocks, all or nothing."""

SMALL = {"blockSize": 8, "kvCacheMemory": "140Ki"}
"""Room for 23 blocks of 8 tokens: one sequence of maxModelLen and a little more."""


@pytest.fixture(scope="module")
def answers(tiny_model: LlamaForCausalLM) -> list[list[int]]:
    """16 greedy tokens each, by transformers."""
    return greedy_reference(tiny_model, PROMPTS, 16)


@pytest.mark.parametrize("memory", [{}, SMALL], ids=["room for all", "preempted"])
@pytest.mark.parametrize("budget", [12, 700], ids=["chunks", "whole prompts"])
@pytest.mark.parametrize(
    ("caching", "overlap"),
    [(True, False), (True, True), (False, False)],
    ids=["cache on", "cache on, steps overlap", "cache off"],
)
def test_answers_are_those_of_transformers(
    tiny_path: Path,
    answers: list[list[int]],
    caching: bool,
    overlap: bool,
    budget: int,
    memory: dict[str, object],
) -> None:
    limits = {"prefixCaching": caching, "maxNumBatchedTokens": budget, **memory}
    core = started(engine_args(tiny_path, engine=limits), overlap=overlap)
    assert generate(core, PROMPTS) == answers
    assert generate(core, PROMPTS[::-1]) == answers[::-1]
    stats = core.stats()
    assert (stats["preemptions"] > 0) == bool(memory)
    assert (stats["prefix_cache_hits"] > 0) == caching
    assert (stats["kv_blocks_cached"] > 0) == caching
    assert stats["kv_blocks_used"] == 0


@pytest.fixture(scope="module")
def replaying(tiny_path: Path) -> EngineCore:
    """With recorded graphs."""
    return started(engine_args(tiny_path, mode="FULL"))


def test_answers_of_replayed_graphs_are_those_of_transformers(
    replaying: EngineCore, answers: list[list[int]]
) -> None:
    for _ in range(2):
        assert generate(replaying, PROMPTS, together=False) == answers
    assert replaying.stats()["prefix_cache_hits"] > 0


def test_the_second_time_only_the_last_block_of_a_prompt_is_computed(
    replaying: EngineCore, answers: list[list[int]]
) -> None:
    def computed() -> int:
        return sum(replaying.stats()["scheduled_tokens"].values())

    generate(replaying, [COMMON[:64]])
    before = computed()
    assert generate(replaying, [COMMON[:64]]) == [answers[1]]
    # The last 16 of 64 tokens in one step, then one token in each of 15.
    assert computed() - before == 16 + 15


def test_a_conversation_goes_on_where_it_ended(
    tiny_model: LlamaForCausalLM, replaying: EngineCore
) -> None:
    first = [3, 1, 4, 1, 5, 9, 2, 6] * 4
    [answer] = generate(replaying, [first])
    second = [*first, *answer, 8, 8, 8]
    replaying.add(AddRequest("second", second, GREEDY))
    [output] = replaying.step()
    # The last token of an answer is never computed, so 47 tokens are: two blocks and a part of one.
    assert output.cached_tokens == 32
    rest = [token for _ in range(15) for out in replaying.step() for token in out.token_ids]
    [expected] = greedy_reference(tiny_model, [second], 16)
    assert [*output.token_ids, *rest] == expected


def test_several_seeded_answers_to_one_prompt_are_those_it_gets_alone(
    replaying: EngineCore,
) -> None:
    def request(seed: int) -> AddRequest:
        params = SamplingParams(max_tokens=12, temperature=1.0, seed=seed, ignore_eos=True)
        return AddRequest(str(seed), [5, *COMMON[:50]], params)

    together = run(replaying, [request(seed) for seed in range(4)])
    alone = {str(seed): run(replaying, [request(seed)])[str(seed)] for seed in range(4)}
    assert together == alone
    assert len({tuple(tokens) for tokens in together.values()}) == 4


def test_an_urgent_request_is_answered_before_those_that_came_earlier(tiny_path: Path) -> None:
    core = started(engine_args(tiny_path, engine={"maxNumSeqs": 1}))
    params = SamplingParams(max_tokens=1)
    for name, priority in (("a", 0), ("b", 0), ("urgent", -1)):
        core.add(AddRequest(name, [1, 2, 3], params, priority))
    order = [output.request_id for _ in range(3) for output in core.step()]
    assert order == ["urgent", "a", "b"]
