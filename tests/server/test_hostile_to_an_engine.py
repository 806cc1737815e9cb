"""Wrong requests, and clients that leave at random: the engine does not notice.

A tenth of what ``make hostile`` does; ``KERF_TEST_REQUESTS`` sets how many requests there are (default 1000).
One client per twenty of them leaves.
"""

from __future__ import annotations

import copy
import os
from collections import Counter

import httpx
import pytest
from benchmarks.hostile_clients import (
    CLOSED,
    HANG,
    MODES,
    REFUSED,
    UNFINISHED,
    explore,
    leave_all,
    throw,
)
from tests.patience import eventually
from tests.server.hostile import RIGHT, make_cases
from tests.server.test_metrics import scrape, value

from benchmarks import hostile

COUNT = int(os.environ.get("KERF_TEST_REQUESTS", "1000"))
GREEDY = {**RIGHT["/v1/completions"], "temperature": 0, "max_tokens": 8}


@pytest.fixture
def at_rest(uncompiled_server):
    """The server, before and after with nothing running and no block in use, and with the same answer."""
    http, engine = uncompiled_server.http, uncompiled_server.engine_pid

    def resting() -> bool:
        samples = scrape(http)
        names = ("kerf_requests_running", "kerf_requests_waiting", "kerf_kv_cache_usage_ratio")
        return all(value(samples, name, model_name="tiny") == 0 for name in names)

    def answer() -> str:
        return http.post("/v1/completions", json=GREEDY).json()["choices"][0]["text"]

    eventually(resting)
    before = answer()
    yield http
    eventually(resting)
    assert answer() == before
    assert uncompiled_server.engine_pid == engine
    counters = http.get("/debug/graphs").json()["counters"]
    assert counters["compilations_after_startup"] == counters["captures_after_startup"] == 0


def address(http) -> str:
    return str(http.base_url).rstrip("/")


def test_hostile_requests_are_answered_and_change_nothing(at_rest):
    cases = make_cases(COUNT)
    answers = throw(address(at_rest), cases)
    unanswered = [
        (case, answer)
        for case, answer in zip(cases, answers, strict=True)
        if answer in (CLOSED, HANG)
    ]
    assert unanswered == []
    outcome = hostile.Outcome()
    outcome.thrown.update(zip((case.kind for case in cases), answers, strict=True))
    assert hostile.compare(outcome) == []
    assert answers.count(400) > COUNT / 2
    assert answers.count(UNFINISHED) > 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("path", sorted(RIGHT))
def test_what_the_openapi_document_allows_and_does_not_is_answered_as_it_says(at_rest, path, mode):
    seen, contradictions = explore(address(at_rest), path, mode, COUNT // 20)
    outcome = hostile.Outcome(explored={(path, mode): seen}, contradictions=contradictions)
    assert hostile.compare(outcome) == []
    assert seen.total() > COUNT / 40


def test_clients_that_leave_at_random_moments_free_every_block(at_rest):
    def aborted() -> float:
        labels = {"model_name": "tiny", "reason": "abort"}
        return value(scrape(at_rest), "kerf_requests_finished_total", **labels)

    before = aborted()
    moments = leave_all(address(at_rest), COUNT // 20)
    assert len(moments) > 3, moments
    assert moments[REFUSED] == 0
    eventually(lambda: aborted() > before)


@pytest.fixture(scope="module")
def outcome(uncompiled_server):
    """The whole program, with few requests."""
    pids = {"HTTP": uncompiled_server.process.pid, "engine": uncompiled_server.engine_pid}
    url = address(uncompiled_server.http)
    return hostile.run(url, lambda: pids, requests=60, examples=3, clients=20)


def test_the_program_does_all_three_and_finds_nothing(outcome):
    assert hostile.compare(outcome) == []
    assert outcome.thrown.total() == 60
    assert set(outcome.explored) == {(path, mode) for path in RIGHT for mode in MODES}
    assert outcome.left.total() == 20


def lose_the_engine(found):
    found.crashes.append("the engine process is not the one of before")


def hang(found):
    found.thrown["deep", HANG] = 2


def close(found):
    found.explored["/v1/completions", "positive"] = Counter({CLOSED: 1})


def fail(found):
    found.thrown["noise", 500] = 1


def accept_noise(found):
    found.thrown["noise", 200] = 1


def accept_what_is_forbidden(found):
    found.explored["/v1/completions", "negative"] = Counter({200: 3})


def contradict(found):
    found.contradictions = ["a", "b"]


def refuse_clients(found):
    found.left[REFUSED] = 4


def answer_otherwise(found):
    found.same_answer = False


def count_a_failure(found):
    found.counted["http"][500] = 1


def keep_a_block(found):
    found.counted["used"] = 0.01


def keep_a_request(found):
    found.counted["alive"] = 1


def compile_late(found):
    found.counted["late"] = 1


def nobody_leaves(found):
    found.counted["ended"]["abort"] = 0


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lose_the_engine, "the engine process is not"),
        (hang, "2 requests without an answer in 20 s"),
        (close, "1 requests whose connection was closed"),
        (fail, "1 hostile requests (noise) answered with 500"),
        (accept_noise, "1 hostile requests (noise) answered with 200"),
        (accept_what_is_forbidden, "3 negative requests to /v1/completions answered with 200"),
        (contradict, "2 answers against the document: a; b"),
        (refuse_clients, "4 clients could not connect"),
        (answer_otherwise, "answered differently"),
        (count_a_failure, "1 answers of 5xx"),
        (keep_a_block, "1.00% of the KV cache"),
        (keep_a_request, "1 requests are running or waiting"),
        (compile_late, "1 compilations or captures"),
        (nobody_leaves, "no request was aborted"),
    ],
)
def test_what_must_not_be_is_a_problem(outcome, damage, words):
    damaged = copy.deepcopy(outcome)
    damage(damaged)
    [problem] = hostile.compare(damaged)
    assert words in problem


def test_after_a_crash_nothing_more_is_sent(uncompiled_server):
    pids = iter([{"engine": 1}, {"engine": None}])
    url = address(uncompiled_server.http)
    found = hostile.run(url, lambda: next(pids), requests=1, examples=1, clients=1)
    assert found.crashes == [
        "the engine process is not the one of before, after 1 hostile requests"
    ]
    assert (found.thrown.total(), found.explored, found.left) == (1, {}, {})
    row = list(hostile.table(hostile.to_record(found)))[-1]
    assert row == "| 1 | 0 | 0 | unknown | unknown |"


def test_a_server_that_is_deaf_afterwards_is_a_crash(uncompiled_server, monkeypatch):
    def throw_and_deafen(url, cases):
        monkeypatch.setattr(hostile, "settled", refuse)
        return [400] * len(cases)

    def refuse(url):
        raise httpx.ReadTimeout("timed out")

    monkeypatch.setattr(hostile, "throw", throw_and_deafen)
    monkeypatch.setattr(hostile, "explore", lambda *_, **__: (Counter(), []))
    monkeypatch.setattr(hostile, "leave_all", lambda *_: Counter())
    url = address(uncompiled_server.http)
    found = hostile.run(url, dict, requests=1, examples=0, clients=0)
    [problem] = hostile.compare(found)
    assert problem == "the server answers no right request afterwards: ReadTimeout('timed out')"


def test_the_record_becomes_a_section_of_the_readme(outcome):
    record = hostile.to_record(outcome)
    text = "\n".join(hostile.table(record))
    assert "Problems: none." in text
    assert "| hostile | 60 |" in text
    aborted = record["results"]["aborted"]
    assert f"| 0 | 0 | 20 | {aborted} | 0 |" in text
    assert aborted > 0
    assert sum(sum(row.values()) for row in record["results"]["hostileByKind"].values()) == 60
