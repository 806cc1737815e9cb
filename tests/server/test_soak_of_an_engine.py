"""The soak of benchmarks/soak.py for a few seconds, and that it would see what it looks for."""

from __future__ import annotations

import asyncio
import copy
import os

import pytest

from benchmarks import soak

REQUESTS = int(os.environ.get("KERF_TEST_SOAK_REQUESTS", "400"))


@pytest.fixture(scope="module")
def soaked(uncompiled_server):
    pids = {"HTTP": uncompiled_server.process.pid, "engine": uncompiled_server.engine_pid}
    url = str(uncompiled_server.http.base_url).rstrip("/")
    return asyncio.run(soak.run(url, pids, requests=REQUESTS, clients=16))


def test_all_counters_of_clients_and_server_add_up(soaked):
    assert soak.compare(soaked) == []
    books = soaked.books
    assert books.sent == REQUESTS
    assert books.sent == sum(books.statuses.values()) + books.left
    assert books.statuses[200] > REQUESTS / 2
    assert books.statuses[400] > 0
    assert books.left > 0
    assert all(min(samples) > 2**20 for samples in soaked.memory.values())


def lose_an_answer(made):
    made.counted["ended"]["length"] -= 1


def lose_a_request(made):
    made.counted["http"][200] -= 1


def lose_a_row(made):
    made.counted["padding"]["FULL"] += 1


def lose_a_step(made):
    made.counted["steps"] += 1


def keep_a_block(made):
    made.counted["used"] = 0.01


def fail_one(made):
    made.counted["ended"]["error"] += 1
    made.counted["ended"]["length"] -= 1


def compile_late(made):
    made.counted["late"] = 1


def grow(made):
    made.memory["engine"] = [2**30 + i * 2**20 for i in range(60)]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lose_an_answer, "answers that ended"),
        (lose_a_request, "requests counted"),
        (lose_a_row, "real and padding tokens"),
        (lose_a_step, "steps timed"),
        (keep_a_block, "1.00% of the KV cache"),
        (fail_one, "answers that ended in one: 1"),
        (compile_late, "after start-up: 0, counted: 1"),
        (grow, "the engine process grew by"),
    ],
)
def test_what_does_not_add_up_is_seen(soaked, damage, words):
    damaged = copy.deepcopy(soaked)
    damage(damaged)
    assert any(words in problem for problem in soak.compare(damaged))


def test_memory_that_stays_is_no_growth_and_few_samples_say_nothing():
    noisy = [2**30 + (i % 3) * 2**20 for i in range(50)]
    found = soak.growths({"a": noisy, "b": [0, 2**30]})
    assert abs(found["a"]) <= 2**20
    assert found["b"] == 0


def test_the_record_becomes_a_section_of_the_readme(soaked):
    text = "\n".join(soak.table(soak.to_record(soaked, clients=16)))
    assert f"{REQUESTS} requests of 16 clients" in text
    assert "What did not add up: nothing." in text
    assert "| median of the last fifth less that of the second, MiB |" in text
    assert "| engine |" in text
