"""What is done to a server for ``benchmarks.hostile`` and the tests: three ways to be a bad client."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import random
import socket
import struct
import time
from collections import Counter
from urllib.parse import urlparse

from benchmarks.tiny_server import MODEL
from tests.server.hostile import Case

__all__ = [
    "ANSWER_SECONDS",
    "CLOSED",
    "HANG",
    "MODES",
    "REFUSED",
    "UNFINISHED",
    "Answer",
    "explore",
    "leave_all",
    "throw",
]

Answer = int | str
"""A status, or one of the following."""
CLOSED = "closed"
"""The connection ended without an answer, though the request was whole."""
HANG = "hang"
"""No answer within ``ANSWER_SECONDS``."""
UNFINISHED = "unfinished"
"""No answer to a request that was not whole: as it should be."""

REFUSED = "refused"
"""A client that could not connect, or was cut off before it left."""

MODES = ("positive", "negative")
"""What schemathesis makes: requests that the OpenAPI document allows, and requests that it does not."""

ANSWER_SECONDS = 20.0
_WAITING_SECONDS = 0.2
"""How long an unfinished request is kept open."""
_MOST_HANGS = 16
"""So many, and the rest is not sent: the program ends in any case."""


def throw(url: str, cases: list[Case]) -> list[Answer]:
    """Send every case on a connection of its own, 16 at a time; how each was answered."""
    hangs: list[Case] = []

    def ask(case: Case) -> Answer:
        answer = HANG if len(hangs) >= _MOST_HANGS else _first_answer(url, case)
        if answer == HANG:
            hangs.append(case)
        return answer

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        return list(pool.map(ask, cases))


def _first_answer(url: str, case: Case) -> Answer:
    unanswered = CLOSED if case.complete else UNFINISHED
    try:
        with _connect(url) as peer:
            with contextlib.suppress(ConnectionError):  # refused before it was sent
                peer.sendall(case.data)
            if not case.complete:
                peer.settimeout(_WAITING_SECONDS)
            received = b""
            while b"\r\n\r\n" not in (received := _without_continue(received)):
                if not (part := peer.recv(65536)):
                    return unanswered
                received += part
    except TimeoutError:
        return HANG if case.complete else UNFINISHED
    except ConnectionError:
        return unanswered
    return int(received.split()[1])


def _connect(url: str) -> socket.socket:
    parsed = urlparse(url)
    return socket.create_connection((parsed.hostname, parsed.port), timeout=ANSWER_SECONDS)


def _without_continue(received: bytes) -> bytes:
    """What comes after a ``100 Continue``."""
    head, end, rest = received.partition(b"\r\n\r\n")
    return rest if end and head.startswith(b"HTTP/1.1 100 ") else received


def explore(
    url: str, path: str, mode: str, examples: int, *, seed: int | None = None
) -> tuple[Counter[Answer], list[str]]:
    """Ask what the OpenAPI document allows (``positive``) or forbids (``negative``).

    Returns:
        How often there was which answer, and what in an answer is not as the document says.
    """
    # Imported here: the tables in README.md are made without them.
    import hypothesis
    import requests
    import schemathesis
    from schemathesis.core.failures import FailureGroup
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    cases = schema[path]["POST"].as_strategy(generation_mode=schemathesis.GenerationMode(mode))
    seen: Counter[Answer] = Counter()
    contradictions: list[str] = []

    def ask(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = MODEL  # any other is refused before anything else is looked at
        if seen[HANG] >= _MOST_HANGS:
            return
        try:
            response = case.call(timeout=ANSWER_SECONDS)
        except requests.Timeout:
            seen[HANG] += 1
            return
        except requests.ConnectionError:
            seen[CLOSED] += 1
            return
        seen[response.status_code] += 1
        try:
            # What a schema cannot say (the model's length, fields that exclude each other) is refused too.
            case.validate_response(response, excluded_checks=[positive_data_acceptance])
        except FailureGroup as failures:
            contradictions.append(f"{mode} {path}: {failures}")

    everything = list(hypothesis.HealthCheck)
    limits = hypothesis.settings(
        max_examples=examples, deadline=None, suppress_health_check=everything, database=None
    )
    test = limits(hypothesis.given(case=cases)(ask))
    (test if seed is None else hypothesis.seed(seed)(test))()
    return seen, contradictions


def leave_all(url: str, clients: int, seed: int = 3) -> Counter[str]:
    """Let clients ask for something long, 20 at a time, and leave; when they did."""
    chance = random.Random(seed)
    seeds = [chance.random() for _ in range(clients)]
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        return Counter(pool.map(lambda own: _leave(url, random.Random(own)), seeds))


def _leave(url: str, chance: random.Random) -> str:
    body = {
        "model": MODEL,
        "prompt": "a" * chance.choice([1, 30, 100]),
        "n": chance.choice([1, 2, 3]),
        "max_tokens": 80,
        "ignore_eos": True,
        "stream": chance.random() < 0.7,
    }
    payload = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    moment = chance.choice(
        ["in the head", "in the body", "at once", "later", "later", "while reading"]
    )
    if moment == "while reading":
        head += b"Connection: close\r\n"  # or who reads to the end of a short answer waits for more
    data = head + b"Content-Length: %d\r\n\r\n" % len(payload) + payload
    try:
        with _connect(url) as peer:
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
    except (ConnectionError, TimeoutError):
        return REFUSED
    return moment
