"""SmolLM2-135M-Instruct answers exactly as transformers does with the same dequantised weights.

21 prompts of 1 to 700 tokens, 32 greedy tokens each, float32; alone and batched (with chunked
prefill), at level 0 and level 3, with and without recorded graphs.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.engine.engines import engine_args, generate, greedy_continuations, started
from tests.models.checkpoints import smollm2_path
from tests.models.smollm2 import transformers_model

from kerf_runtime.compilation.counters import compilation_counter
from kerf_runtime.engine.core import EngineCore
from kerf_runtime.engine.messages import AddRequest, SamplingParams
from kerf_runtime.models import load_tokenizer

ROOT = Path(__file__).parents[2]
LENGTHS = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 100, 128, 200, 350, 512, 700)
ANSWER = 32
GREEDY = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
ENGINE = {
    "maxModelLen": 768,
    "maxNumSeqs": 8,
    "maxNumBatchedTokens": 256,
    "kvCacheMemory": "512Mi",
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Pieces of a real text, and lengths around every border: blocks, graphs, chunks."""
    tokenizer = load_tokenizer(smollm2_path())
    text = tokenizer.encode((ROOT / "LICENSE").read_text())
    places = random.Random(1)
    starts = [places.randrange(len(text) - length) for length in LENGTHS]
    return [text[start : start + length] for start, length in zip(starts, LENGTHS, strict=True)]


class Reference:
    """transformers, which is asked only once about an answer that several configurations give."""

    def __init__(self) -> None:
        self.model = transformers_model()
        self.known: dict[tuple[int, ...], list[int]] = {}

    def continuations(self, prompts: list[list[int]], answers: list[list[int]]) -> list[list[int]]:
        """As ``greedy_continuations``, which says why equality to ``answers`` is what there is to prove."""
        found = []
        for prompt, answer in zip(prompts, answers, strict=True):
            asked = (len(prompt), *prompt, *answer)
            if asked not in self.known:
                [self.known[asked]] = greedy_continuations(self.model, [prompt], [answer])
            found.append(self.known[asked])
        return found


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


@pytest.fixture(
    scope="module",
    params=[(0, "NONE"), (0, "FULL_DECODE_ONLY"), (3, "NONE"), (3, "FULL_AND_PIECEWISE")],
    ids=lambda p: f"level {p[0]} {p[1]}",
)
def core(request: pytest.FixtureRequest, compile_cache: Path) -> EngineCore:
    level, mode = request.param
    args = engine_args(smollm2_path(), level=level, mode=mode, cache=compile_cache, engine=ENGINE)
    return started(args)


@pytest.mark.parametrize("together", [True, False], ids=["batched", "alone"])
def test_answers_are_those_of_transformers(
    core: EngineCore, prompts: list[list[int]], reference: Reference, together: bool
) -> None:
    assert not core.report()["effective"]["changes"]
    answers = generate(core, prompts, GREEDY, together=together)
    assert [len(answer) for answer in answers] == [ANSWER] * len(prompts)
    assert reference.continuations(prompts, answers) == answers


def test_nothing_is_compiled_or_captured_while_requests_come_and_go(
    core: EngineCore, prompts: list[list[int]]
) -> None:
    chance = random.Random(5)
    waiting = [
        AddRequest(
            str(i), prompt[: chance.randint(1, 90)], SamplingParams(max_tokens=chance.randint(1, 6))
        )
        for i, prompt in enumerate(prompts)
    ]
    with compilation_counter.expect(
        dynamo_traces=0,
        inductor_compilations=0,
        graphs_captured=0,
        guards_evaluated=0,
        compilations_after_startup=0,
        captures_after_startup=0,
    ):
        while waiting or core.has_work:
            for _ in range(min(len(waiting), chance.randint(0, 3))):
                core.add(waiting.pop())
            core.step()
    assert core.stats()["kv_blocks_used"] == 0


@pytest.mark.parametrize(
    ("limits", "preempted"),
    [
        pytest.param({"prefixCaching": False, "maxNumBatchedTokens": 768}, False, id="cache off"),
        pytest.param({"maxNumBatchedTokens": 16}, False, id="chunks"),
        pytest.param({"maxModelLen": 128, "kvCacheMemory": "7200Ki"}, True, id="preempted"),
    ],
)
def test_answers_do_not_depend_on_what_the_scheduler_does(
    prompts: list[list[int]], reference: Reference, limits: dict[str, object], preempted: bool
) -> None:
    core = started(engine_args(smollm2_path(), engine={**ENGINE, **limits}))
    asked = [prompt for prompt in prompts if len(prompt) in (16, 33, 64, 100)]
    asked.append([*asked[-1][:40], *asked[0]])
    answers = generate(core, asked, SamplingParams(max_tokens=16, ignore_eos=True))
    assert reference.continuations(asked, answers) == answers
    stats = core.stats()
    assert (stats["preemptions"] > 0) == preempted
    assert (stats["prefix_cache_hits"] > 0) == limits.get("prefixCaching", True)
