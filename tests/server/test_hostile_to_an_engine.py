"""Thousands of wrong requests, and clients that leave at random: the engine does not notice.

The generator breaks right requests in one place each, since what is wrong everywhere is refused at the
first check and reaches no other.  ``KERF_TEST_REQUESTS`` sets how many there are (default 1000), and
one client per twenty of them leaves.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import random
import socket
import time
from urllib.parse import urlparse

import pytest
from tests.server.fakes import eventually
from tests.server.test_metrics import scrape, value

from kerf_runtime.server.schema import UNSUPPORTED, ChatRequest, CompletionRequest

COUNT = int(os.environ.get("KERF_TEST_REQUESTS", "1000"))
RIGHT = {
    "/v1/completions": {"model": "tiny", "prompt": "ab", "max_tokens": 2},
    "/v1/chat/completions": {
        "model": "tiny",
        "messages": [{"role": "user", "content": "ab"}],
        "max_tokens": 2,
    },
}
WRONG = [
    *(-(10**30), -1, 10**30, 2**63, 1.5, "x", "", "\x00", [], [None], {}, {"a": []}, True),
    *([-1], [[]], ["a", 1], [10**9], {"1": 1e9}, {"x": 1}, {"-1": 0}, "\ud800", [{}], [[-1]]),
    *({"role": "user"}, [{"role": 1}], [{"role": "user", "content": [{"type": "x"}]}]),
    *("z" * 3000, list(range(3000)), [1] * 400),
]
FIELDS = sorted({*CompletionRequest.model_fields, *ChatRequest.model_fields, *UNSUPPORTED, "what"})


def cases(count: int) -> list[tuple[str, bytes]]:
    """Paths and bodies."""
    chance = random.Random(7)
    made = []
    for _ in range(count):
        path = chance.choice(sorted(RIGHT))
        body = {**RIGHT[path], chance.choice(FIELDS): chance.choice(WRONG)}
        text = json.dumps(body).encode()
        kind = chance.random()
        if kind < 0.1:
            text = text[: chance.randrange(len(text))]
        elif kind < 0.2:
            at = chance.randrange(len(text))
            text = text[:at] + bytes([chance.randrange(256)]) + text[at + 1 :]
        made.append((path, text))
    return made


@pytest.fixture
def at_rest(uncompiled_server):
    """The server, before and after with nothing running and no block in use."""
    http = uncompiled_server.http

    def resting() -> bool:
        samples = scrape(http)
        names = ("kerf_requests_running", "kerf_requests_waiting", "kerf_kv_cache_usage_ratio")
        return all(value(samples, name, model_name="tiny") == 0 for name in names)

    eventually(resting)
    yield http
    eventually(resting)
    answer = http.post("/v1/completions", json={**RIGHT["/v1/completions"], "temperature": 0})
    assert answer.json()["usage"]["completion_tokens"] == 2
    assert uncompiled_server.process.poll() is None


def test_wrong_requests_are_answered_and_change_nothing(at_rest):
    headers = {"content-type": "application/json"}

    def ask(case: tuple[str, bytes]) -> int:
        path, content = case
        response = at_rest.post(path, content=content, headers=headers)
        if response.status_code != 200:
            assert response.json()["error"]["message"], case
        return response.status_code

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(ask, cases(COUNT)))
    assert set(statuses) <= {200, 400, 404}
    assert statuses.count(400) > COUNT / 2


def test_clients_that_leave_at_random_moments_free_every_block(at_rest):
    chance = random.Random(3)
    url = urlparse(str(at_rest.base_url))

    def aborted() -> float:
        labels = {"model_name": "tiny", "reason": "abort"}
        return value(scrape(at_rest), "kerf_requests_finished_total", **labels)

    before = aborted()

    def visit(seconds: float) -> None:
        body = {"model": "tiny", "prompt": "a", "n": 2, "max_tokens": 150, "stream": True}
        payload = json.dumps({**body, "ignore_eos": True}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(payload)}\r\n\r\n"
        )
        with socket.create_connection((url.hostname, url.port), timeout=10) as connection:
            connection.sendall(head.encode() + payload)
            time.sleep(seconds)

    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        list(pool.map(visit, [chance.random() * 0.2 for _ in range(COUNT // 20)]))
    eventually(lambda: aborted() > before)
