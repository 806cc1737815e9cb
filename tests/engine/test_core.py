"""The engine in this process on a tiny random Llama, at both levels and in every mode."""

from __future__ import annotations

import ast
import json
import random
from pathlib import Path

import pytest
import torch
from tests.engine.engines import engine_args, generate, run, started
from tests.models.checkpoints import make_llama, write_safetensors

from kerf_runtime.compilation.counters import compilation_counter
from kerf_runtime.engine.core import EngineCore
from kerf_runtime.engine.messages import AddRequest, SamplingParams
from kerf_runtime.engine.phases import PHASES
from kerf_runtime.errors import CacheError, ConfigError, EngineError, ModelError, RequestError

LEVEL_AND_MODE = [
    (0, "NONE"),
    (0, "FULL"),
    (0, "FULL_DECODE_ONLY"),
    (3, "NONE"),
    (3, "PIECEWISE"),
    (3, "FULL"),
    (3, "FULL_DECODE_ONLY"),
    (3, "FULL_AND_PIECEWISE"),
]


@pytest.fixture(scope="module", params=LEVEL_AND_MODE, ids=lambda p: f"level {p[0]} {p[1]}")
def core(request: pytest.FixtureRequest, tiny_path: Path, compile_cache: Path) -> EngineCore:
    level, mode = request.param
    return started(engine_args(tiny_path, level=level, mode=mode, cache=compile_cache))


@pytest.mark.parametrize("together", [True, False], ids=["batched", "alone"])
def test_greedy_answers_are_those_of_transformers(
    core: EngineCore,
    tiny_prompts: list[list[int]],
    tiny_answers: list[list[int]],
    together: bool,
) -> None:
    assert generate(core, tiny_prompts, together=together) == tiny_answers


def test_the_effective_mode_decides_what_is_recorded_and_replayed(
    core: EngineCore, tiny_prompts: list[list[int]]
) -> None:
    mode = core.report()["effective"]["mode"]
    before = core.stats()["dispatch"]
    # Short prompts alone are mixed batches within the recorded sizes.
    generate(core, tiny_prompts[:3], together=False)
    generate(core, tiny_prompts)
    used = {row[0] for row in core.stats()["dispatch"] if row not in before}
    expected = {
        "NONE": {"NONE"},
        "PIECEWISE": {"PIECEWISE", "NONE"},
        "FULL": {"FULL", "NONE"},
        "FULL_DECODE_ONLY": {"FULL", "NONE"},
        "FULL_AND_PIECEWISE": {"FULL", "PIECEWISE", "NONE"},
    }
    assert used == expected[mode]
    recorded = {graph["mode"] for graph in core.report()["graphs"]["descriptors"]}
    assert recorded == expected[mode] - {"NONE"}


def test_nothing_is_left_when_everything_is_answered(core: EngineCore) -> None:
    generate(core, [[1, 2, 3]] * 9)
    stats = core.stats()
    assert (stats["requests_running"], stats["requests_waiting"], stats["kv_blocks_used"]) == (
        0,
        0,
        0,
    )


@pytest.fixture(scope="module")
def eager(tiny_path: Path) -> EngineCore:
    return started(engine_args(tiny_path))


@pytest.fixture(scope="module")
def compiled(tiny_path: Path, compile_cache: Path) -> EngineCore:
    args = engine_args(tiny_path, level=3, mode="FULL_AND_PIECEWISE", cache=compile_cache)
    return started(args)


def test_answers_are_the_same_when_blocks_run_out(
    tiny_path: Path, tiny_prompts: list[list[int]], tiny_answers: list[list[int]]
) -> None:
    # 3 KiB per block: one block more than a sequence of maxModelLen needs.
    limits = {"blockSize": 4, "kvCacheMemory": "100Ki"}
    small = started(engine_args(tiny_path, engine=limits))
    assert small.stats()["kv_blocks_total"] == 33
    assert generate(small, tiny_prompts) == tiny_answers
    assert small.stats()["preemptions"] > 0


@pytest.mark.parametrize("budget", [6, 7, 128])
def test_answers_do_not_depend_on_how_prompts_are_cut(
    tiny_path: Path, tiny_prompts: list[list[int]], tiny_answers: list[list[int]], budget: int
) -> None:
    core = started(engine_args(tiny_path, engine={"maxNumBatchedTokens": budget}))
    assert generate(core, tiny_prompts) == tiny_answers


@pytest.mark.parametrize("block_size", [1, 5, 64])
def test_answers_do_not_depend_on_the_block_size(
    tiny_path: Path, tiny_prompts: list[list[int]], tiny_answers: list[list[int]], block_size: int
) -> None:
    core = started(engine_args(tiny_path, engine={"blockSize": block_size}))
    assert generate(core, tiny_prompts) == tiny_answers


def test_a_seed_gives_the_same_answer_alone_and_in_any_company(
    compiled: EngineCore, tiny_prompts: list[list[int]]
) -> None:
    seeded = SamplingParams(max_tokens=16, temperature=0.9, top_k=40, seed=7, ignore_eos=True)
    unseeded = SamplingParams(max_tokens=16, temperature=1.3, ignore_eos=True)
    request = AddRequest("x", tiny_prompts[3], seeded)
    alone = run(compiled, [request])["x"]
    others = [AddRequest(str(i), prompt, unseeded) for i, prompt in enumerate(tiny_prompts[:4])]
    assert run(compiled, [*others, request])["x"] == alone
    assert run(compiled, [request, *others])["x"] == alone


def test_every_parameter_gives_the_same_answer_alone_and_in_any_company(
    eager: EngineCore, tiny_prompts: list[list[int]]
) -> None:
    params = SamplingParams(
        max_tokens=16,
        temperature=0.9,
        min_p=0.02,
        seed=7,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        repetition_penalty=1.2,
        logit_bias=((5, 2.0), (6, -100.0)),
        min_tokens=8,
        ignore_eos=True,
    )
    request = AddRequest("x", tiny_prompts[3], params)
    other = SamplingParams(max_tokens=16, temperature=1.3, frequency_penalty=1.0, ignore_eos=True)
    others = [AddRequest(str(i), prompt, other) for i, prompt in enumerate(tiny_prompts[:4])]
    alone = run(eager, [request])["x"]
    assert run(eager, [*others, request])["x"] == alone
    assert 6 not in alone


def test_no_answer_ends_before_min_tokens(
    eager: EngineCore, tiny_prompts: list[list[int]], tiny_answers: list[list[int]]
) -> None:
    stop = tuple(set(tiny_answers[4]))
    short = SamplingParams(max_tokens=16, stop_token_ids=stop, ignore_eos=True)
    longer = SamplingParams(max_tokens=16, stop_token_ids=stop, ignore_eos=True, min_tokens=6)
    assert len(generate(eager, [tiny_prompts[4]], short)[0]) == 1
    answer = generate(eager, [tiny_prompts[4]], longer)[0]
    assert len(answer) >= 6
    assert not set(answer[:5]) & set(stop)


def test_log_probabilities_come_with_the_tokens_of_those_who_asked(
    eager: EngineCore, tiny_prompts: list[list[int]]
) -> None:
    asked = SamplingParams(max_tokens=4, logprobs=2, ignore_eos=True)
    bare = SamplingParams(max_tokens=4, ignore_eos=True)
    eager.add(AddRequest("asked", tiny_prompts[0], asked))
    eager.add(AddRequest("bare", tiny_prompts[1], bare))
    found: dict[str, list[object]] = {"asked": [], "bare": []}
    while eager.has_work:
        for output in eager.step():
            found[output.request_id].append(output.logprobs)
            if output.logprobs is not None:
                (entry,) = output.logprobs
                assert entry.top[0] == (output.token_ids[0], entry.logprob)
                assert len(entry.top) == 2
    assert found["bare"] == [None] * 4
    assert None not in found["asked"]


def test_without_a_seed_answers_differ(eager: EngineCore) -> None:
    params = SamplingParams(max_tokens=16, temperature=2.0, ignore_eos=True)
    first, second = generate(eager, [[1, 2, 3]] * 2, params)
    assert first != second


def test_answers_end_with_the_models_own_token_unless_told_otherwise(
    eager: EngineCore, tiny_prompts: list[list[int]], tiny_answers: list[list[int]]
) -> None:
    answer = tiny_answers[4]
    stop = SamplingParams(max_tokens=16, stop_token_ids=(answer[5],), ignore_eos=True)
    assert generate(eager, [tiny_prompts[4]], stop) == [answer[: answer.index(answer[5]) + 1]]


def test_an_aborted_request_says_nothing_more_and_frees_its_blocks(eager: EngineCore) -> None:
    eager.add(AddRequest("gone", [1] * 20, SamplingParams(max_tokens=50)))
    eager.step()
    aborted = eager.stats()["requests_finished"].get("abort", 0)
    eager.abort("gone")
    eager.abort("never there")
    assert eager.step() == []
    assert eager.stats()["kv_blocks_used"] == 0
    assert eager.stats()["requests_finished"]["abort"] == aborted + 1


def test_a_refused_request_changes_nothing(eager: EngineCore) -> None:
    before = eager.stats()
    with pytest.raises(RequestError, match="129 tokens, above maxModelLen 128"):
        eager.add(AddRequest("long", [1] * 129, SamplingParams(max_tokens=1)))
    assert eager.stats() == before


def test_no_compilation_no_guard_and_no_capture_while_200_random_requests_run(
    compiled: EngineCore,
) -> None:
    chance = random.Random(3)
    waiting = [
        AddRequest(
            f"r{number}",
            [chance.randrange(320) for _ in range(chance.randint(1, 110))],
            SamplingParams(
                max_tokens=chance.randint(1, 30),
                temperature=chance.choice([0.0, 0.8]),
                top_p=chance.choice([1.0, 0.9]),
                seed=number,
            ),
        )
        for number in range(200)
    ]
    before = compiled.stats()
    unchanged = {
        "dynamo_traces": 0,
        "backend_compilations": 0,
        "inductor_compilations": 0,
        "graphs_captured": 0,
        "guards_evaluated": 0,
        "compilations_after_startup": 0,
        "captures_after_startup": 0,
    }
    finished: dict[str, str] = {}
    with compilation_counter.expect(**unchanged):
        while waiting or compiled.has_work:
            for _ in range(min(len(waiting), chance.randint(0, 3))):
                compiled.add(waiting.pop())
            for output in compiled.step():
                if output.finish_reason is not None:
                    finished[output.request_id] = output.finish_reason
    assert len(finished) == 200
    after = compiled.stats()
    done = {
        k: v - before["requests_finished"].get(k, 0) for k, v in after["requests_finished"].items()
    }
    assert sum(done.values()) == 200
    assert after["kv_blocks_used"] == 0


def test_the_numbers_add_up(tiny_path: Path, tiny_prompts: list[list[int]]) -> None:
    core = started(engine_args(tiny_path, mode="FULL_DECODE_ONLY"))
    answers = generate(core, tiny_prompts)
    stats = core.stats()
    assert stats["prompt_tokens"] == sum(map(len, tiny_prompts))
    assert stats["generation_tokens"] == sum(map(len, answers))
    assert stats["requests_finished"] == {"length": len(tiny_prompts)}
    steps = sum(row[-1] for row in stats["dispatch"])
    assert steps == sum(sum(h["counts"]) for h in stats["step_seconds"].values())
    assert steps == sum(count for _, count in stats["batches"])
    rows = sum(size * count for mode, size, _, count in stats["dispatch"] if mode == "FULL")
    assert rows == stats["scheduled_tokens"]["FULL"] + stats["padding_tokens"]["FULL"]
    scheduled = sum(stats["scheduled_tokens"].values())
    # No batch is large enough to be counted under another number than its own.
    assert scheduled == sum(tokens * count for tokens, count in stats["batches"])
    # The last token of an answer is never computed.
    assert scheduled == stats["prompt_tokens"] + stats["generation_tokens"] - len(tiny_prompts)
    assert sum(stats["queue_seconds"]["counts"]) == len(tiny_prompts)
    replays = sum(hits for *_, hits in stats["graph_hits"])
    assert replays == sum(row[-1] for row in stats["dispatch"] if row[0] != "NONE")


def test_the_report_tells_what_is_in_force_and_how_long_start_up_took(compiled: EngineCore) -> None:
    report = compiled.report()
    assert report["cache"]["result"] in ("hit", "miss")
    assert report["effective"]["mode"] == "FULL_AND_PIECEWISE"
    assert report["graphs"]["backend"] == "emulated"
    assert set(report["startup"]) <= set(PHASES)
    assert {"import", "weights", "kv_alloc", "warmup", "capture", "ready"} <= set(report["startup"])
    parts = sum(seconds for phase, seconds in report["startup"].items() if phase != "ready")
    assert parts <= report["startup"]["ready"] * 1.01


def test_a_second_start_loads_what_the_first_compiled(tiny_path: Path, compile_cache: Path) -> None:
    args = engine_args(tiny_path, level=3, mode="NONE", cache=compile_cache)
    started(args)
    with compilation_counter.expect(dynamo_traces=0, inductor_compilations=0, artifacts_loaded=3):
        core = started(args)
    assert core.report()["cache"]["result"] == "hit"
    assert "trace" not in core.report()["startup"]


def test_a_dump_shows_the_configuration_in_force_and_the_code_that_runs(
    tiny_path: Path, compile_cache: Path, tmp_path: Path
) -> None:
    options = {"level": 3, "mode": "PIECEWISE", "cache": compile_cache}
    started(engine_args(tiny_path, **options, debug_dump_path=tmp_path / "dump"))
    names = {path.name for path in (tmp_path / "dump").iterdir()}
    assert len([name for name in names if name.startswith("piece_")]) == 3
    resolution = json.loads((tmp_path / "dump" / "resolution.json").read_text())
    assert resolution["effective"]["mode"] == "PIECEWISE"
    forward = (tmp_path / "dump" / "transformed_code.py").read_text()
    assert forward.count("kerf::attention") == 3
    compile(forward, "transformed_code.py", "exec")
    graph = ast.parse((tmp_path / "dump" / "computation_graph.py").read_text())
    calls = [ast.unparse(node.func) for node in ast.walk(graph) if isinstance(node, ast.Call)]
    assert calls.count("torch.ops.kerf.attention") == 3


def test_a_dump_that_cannot_be_written_is_refused(tiny_path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write the dump"):
        started(engine_args(tiny_path, debug_dump_path=tmp_path / "file" / "dump"))


def test_start_up_announces_its_phases_in_order(tiny_path: Path) -> None:
    seen: list[str] = []
    core = EngineCore(engine_args(tiny_path, mode="FULL_DECODE_ONLY"))
    core.startup(lambda phase, detail, fraction: seen.append(phase))
    phases = list(dict.fromkeys(seen))
    assert phases == [
        "import",
        "cache_verify",
        "weights",
        "warmup",
        "estimate",
        "kv_alloc",
        "capture",
        "ready",
    ]


def test_an_engine_that_was_not_started_says_so(tiny_path: Path) -> None:
    with pytest.raises(EngineError, match="has not been started"):
        EngineCore(engine_args(tiny_path)).step()


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"maxModelLen": 1000}, "above the model's own limit of 256"),
        ({"kvCacheMemory": "50Ki"}, "one sequence of maxModelLen 128 needs"),
    ],
)
def test_impossible_limits_are_refused_before_the_weights_are_read(
    tiny_path: Path, engine: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        started(engine_args(tiny_path, engine=engine))


def test_a_missing_model_is_an_error_of_the_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        started(engine_args(tmp_path / "nowhere"))


def test_a_model_that_computes_no_numbers_is_refused(tmp_path: Path) -> None:
    model = make_llama()
    torch.nn.init.constant_(model.model.norm.weight, float("nan"))
    folder = write_safetensors(tmp_path, model)
    with pytest.raises(ModelError, match="logits that are no numbers"):
        started(engine_args(folder))


def test_another_cache_key_than_the_operators_is_refused(tiny_path: Path) -> None:
    args = engine_args(tiny_path, level=3, expected_cache_key="0123456789abcdef")
    with pytest.raises(CacheError, match="expects cache key 0123456789abcdef"):
        started(args)
