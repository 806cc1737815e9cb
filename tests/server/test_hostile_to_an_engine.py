"""Thousands of wrong requests, and clients that leave at random: the engine does not notice.

``KERF_TEST_REQUESTS`` sets how many there are (default 1000); one client per twenty of them leaves.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import random
import socket
import struct
import time
from collections import Counter

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance
from tests.server.fakes import eventually
from tests.server.hostile import RIGHT, Case, make_cases
from tests.server.test_metrics import scrape, value

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


def connect(http):
    return socket.create_connection((http.base_url.host, http.base_url.port), timeout=20)


def first_status(http, case: Case) -> int | None:
    """Status of the first answer; None if the connection was closed, or left waiting, without one."""
    with connect(http) as peer:
        with contextlib.suppress(ConnectionError):  # refused before it was sent
            peer.sendall(case.data)
        if not case.complete:
            peer.settimeout(0.2)
        received = b""
        while b"\r\n\r\n" not in (received := _without_continue(received)):
            try:
                part = peer.recv(65536)
            except ConnectionError:
                return None
            except TimeoutError:
                if case.complete:
                    raise
                return None
            if not part:
                return None
            received += part
    return int(received.split()[1])


def _without_continue(received: bytes) -> bytes:
    """What comes after a ``100 Continue``."""
    head, end, rest = received.partition(b"\r\n\r\n")
    return rest if end and head.startswith(b"HTTP/1.1 100 ") else received


def test_hostile_requests_are_answered_and_change_nothing(at_rest):
    cases = make_cases(COUNT)

    def ask(case: Case) -> tuple[Case, int | None]:
        return case, first_status(at_rest, case)

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, cases))
    by_kind = Counter((case.kind, status) for case, status in answers)
    print(f"{len(cases)} requests: {sorted(by_kind.items(), key=str)}")  # noqa: T201  (shown on failure)
    unanswered = [case for case, status in answers if case.complete and status is None]
    assert unanswered == []
    assert {status for _, status in answers} <= {None, 200, 400, 404, 405, 413}
    for kind in ("cut body", "noise", "deep", "oversized"):
        assert by_kind[kind, 200] == 0
    assert sum(n for (_, status), n in by_kind.items() if status == 400) > COUNT / 2


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("path", sorted(RIGHT))
def test_what_the_openapi_document_allows_and_does_not_is_answered_as_it_says(at_rest, path, mode):
    schema = schemathesis.openapi.from_url(f"{at_rest.base_url}/openapi.json")
    seen: Counter[int] = Counter()

    @settings(max_examples=COUNT // 20, suppress_health_check=list(HealthCheck), database=None)
    @given(case=schema[path]["POST"].as_strategy(generation_mode=mode))
    def ask(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = (
                "tiny"  # any other name is refused before anything else is looked at
            )
        response = case.call(timeout=20)
        seen[response.status_code] += 1
        # What a schema cannot say (the model's length, fields that exclude each other) is refused too.
        case.validate_response(response, excluded_checks=[positive_data_acceptance])

    ask()
    assert set(seen) <= {200, 400, 404}
    if mode is GenerationMode.NEGATIVE:
        assert seen[200] == 0


def test_clients_that_leave_at_random_moments_free_every_block(at_rest):
    chance = random.Random(3)

    def aborted() -> float:
        labels = {"model_name": "tiny", "reason": "abort"}
        return value(scrape(at_rest), "kerf_requests_finished_total", **labels)

    before = aborted()
    pool = concurrent.futures.ThreadPoolExecutor(20)
    with pool:
        seeds = [chance.random() for _ in range(COUNT // 20)]
        moments = Counter(pool.map(lambda seed: leave(at_rest, random.Random(seed)), seeds))
    assert len(moments) > 3, moments
    eventually(lambda: aborted() > before)


def leave(http, chance: random.Random) -> str:
    """Ask for something long and go away; says when."""
    body = {
        "model": "tiny",
        "prompt": "a" * chance.choice([1, 30, 100]),
        "n": chance.choice([1, 2, 3]),
        "max_tokens": 80,
        "ignore_eos": True,
        "stream": chance.random() < 0.7,
    }
    payload = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    data = head + b"Content-Length: %d\r\n\r\n" % len(payload) + payload
    moment = chance.choice(
        ["in the head", "in the body", "at once", "later", "later", "while reading"]
    )
    with connect(http) as peer:
        if chance.random() < 0.5:  # a reset instead of an orderly end
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if moment == "in the head":
            peer.sendall(data[: chance.randrange(len(head))])
        elif moment == "in the body":
            peer.sendall(data[: -chance.randrange(1, len(payload))])
        else:
            peer.sendall(data)
        if moment == "later":
            time.sleep(chance.random() * 0.2)
        elif moment == "while reading":
            for _ in range(chance.randrange(1, 5)):
                peer.recv(200)
    return moment
