"""Planning a load, reading event streams of all kinds of servers, and what is made of the outcomes."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.patience import PATIENCE, eventually, join

from kerf_runtime.cli import load
from kerf_runtime.cli.load import (
    Load,
    Outcome,
    Planned,
    Target,
    find_served_model,
    plan,
    run_load,
    summarize,
)
from kerf_runtime.errors import ConfigError

LOAD = Load(requests=20, concurrency=4, input_len=30, output_len=10)


def piece(text: str, **more: object) -> dict:
    return {"choices": [{"index": 0, "text": text, "finish_reason": None}], **more}


USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 6, "total_tokens": 13}}


UNTIL_THE_END = object()
"""A part of an answer: nothing more comes while anybody waits for it."""


class Peer(BaseHTTPRequestHandler):
    """An OpenAI-compatible server of somebody else: answers as ``server.script`` says, without chunks."""

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": "theirs"}]}).encode())

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self.server.bodies.append(
            (self.path, json.loads(self.rfile.read(length)), dict(self.headers))
        )
        answer = self.server.script(len(self.server.bodies))
        if isinstance(answer, tuple):
            self._send(*answer)
            return
        self.send_response(200)
        self.end_headers()
        for part in answer:
            if callable(part):
                part()
                continue
            if part is UNTIL_THE_END:
                self.server.over.wait(PATIENCE)
                continue
            self.wfile.write(
                part if isinstance(part, bytes) else b"data: %s\n\n" % json.dumps(part).encode()
            )
            self.wfile.flush()

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Nothing: the tests look at ``bodies``."""


class PeerServer(ThreadingHTTPServer):
    request_queue_size = (
        128  # with five, a machine that stalls refuses some of twenty requests at once
    )


@contextmanager
def peer(script) -> Iterator[ThreadingHTTPServer]:
    """A running server; ``script(n)`` is what it answers to the n-th request: parts, or status and body.

    Parts that can be called are, and send nothing.
    """
    server = PeerServer(("127.0.0.1", 0), Peer)
    server.bodies, server.script, server.over = [], script, threading.Event()
    server.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.over.set()
        server.shutdown()
        server.server_close()
        join(thread)


DONE = b"data: [DONE]\n\n"
ONE = (Planned(0.0, "a b", 5),)


def answers(script, planned=ONE, concurrency=1, **target) -> list[Outcome]:
    with peer(script) as server:
        made = Target(base_url=server.url, model="theirs", **target)
        return asyncio.run(run_load(made, planned, concurrency=concurrency))


@given(st.integers(0, 2**32), st.integers(1, 50), st.floats(0, 1), st.integers(0, 20))
def test_a_plan_is_its_seeds_and_keeps_to_the_lengths(seed, output_len, ratio, prefix):
    load = replace(LOAD, seed=seed, output_len=output_len, range_ratio=ratio, prefix_len=prefix)
    planned = plan(load)
    assert planned == plan(load)
    prompts = [request.prompt.split() for request in planned]
    assert all(prefix < len(prompt) <= 30 for prompt in prompts)
    assert all(1 <= request.output_len <= output_len for request in planned)
    assert len({tuple(prompt[:prefix]) for prompt in prompts}) == 1
    exact = plan(replace(load, range_ratio=0.0))
    assert {len(request.prompt.split()) for request in exact} == {30}
    assert len({request.prompt for request in exact}) > 1


def test_token_ids_are_below_the_vocabulary_and_exactly_as_many_as_asked_for():
    for request in plan(replace(LOAD, vocab_size=50)):
        assert len(request.prompt) == 30
        assert all(0 <= token < 50 for token in request.prompt)


def test_arrivals_come_at_the_rate_that_was_asked_for():
    at = [request.at for request in plan(replace(LOAD, requests=4000, rate=20.0))]
    assert at == sorted(at)
    assert at[-1] == pytest.approx(200, rel=0.1)
    assert {request.at for request in plan(LOAD)} == {0.0}


def test_tokens_are_the_servers_count_and_the_pieces_are_timed(monkeypatch):
    made: list[Outcome] = []

    def make(*values: float) -> Outcome:
        made.append(Outcome(*values))
        return made[-1]

    def pause_after(texts: int) -> Callable[[], None]:
        def pause() -> None:
            """Once all that was sent has been timed: a machine that stops must not make it look shorter."""
            eventually(lambda: len(made[0].texts) == texts)
            time.sleep(0.2)

        return pause

    monkeypatch.setattr(load, "Outcome", make)
    first, second = pause_after(0), pause_after(2)
    script = [first, piece("a"), piece("bc"), second, piece(""), piece("d"), USAGE, DONE]
    [outcome] = answers(lambda n: script)
    assert outcome.error is None
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.counted) == (7, 6, True)
    assert len(outcome.texts) == 3
    found = summarize([outcome])
    assert found["ttftSeconds"]["p50"] >= 0.2
    assert found["itlSeconds"]["max"] >= 0.2
    assert found["tpotSeconds"]["p50"] >= 0.2 / 5
    assert found["latencySeconds"]["p50"] >= 0.4
    assert found["tokensCountedBy"] == "server"


def test_a_server_that_counts_no_tokens_is_counted_by_its_pieces():
    [outcome] = answers(lambda n: [piece("a"), piece("b"), DONE])
    assert (outcome.prompt_tokens, outcome.output_tokens) == (0, 2)
    assert summarize([outcome])["tokensCountedBy"] == "pieces of text"


@pytest.mark.parametrize(
    "odd",
    [
        {"choices": None, "usage": None},
        {"choices": [{"index": 0, "text": None, "delta": None}]},
        {"usage": {"total_tokens": 3}},
        {"object": "ping", "error": None, "choices": []},
    ],
    ids=str,
)
def test_events_of_other_servers_without_text_are_passed_over(odd):
    [outcome] = answers(lambda n: [odd, piece("a", usage=None), odd, DONE])
    assert outcome.error is None
    assert outcome.output_tokens == 1


def test_events_may_be_cut_anywhere_and_have_comments_and_other_line_ends():
    whole = (
        b": hello\r\n\r\nevent: x\r\ndata:" + json.dumps(piece("a")).encode() + b"\r\n\r\n" + DONE
    )
    [outcome] = answers(lambda n: [part for i in range(len(whole)) for part in (whole[i : i + 1],)])
    assert outcome.error is None
    assert len(outcome.texts) == 1


def test_a_chat_reads_deltas_and_thoughts():
    deltas = [{"role": "assistant", "content": ""}, {"reasoning_content": "hm"}, {"content": "a"}]
    script = [*({"choices": [{"index": 0, "delta": delta}]} for delta in deltas), DONE]
    [outcome] = answers(lambda n: script, chat=True)
    assert len(outcome.texts) == 2


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ((429, b'{"error": {"message": "slow down"}}'), "HTTP 429: slow down"),
        ((500, b"<html>oh"), "HTTP 500: <html>oh"),
        ([piece("a"), {"error": {"message": "it broke"}}], "in the stream: it broke"),
        ([piece("a")], "the stream ended early"),
        ([b"data: {nonsense\n\n"], "an event cannot be read"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_whole_answer_is_a_failure_with_its_reason(script, error):
    assert_failed(script, error)


def test_an_answer_that_does_not_end_in_time_is_a_failure():
    script = [piece("a"), UNTIL_THE_END, DONE]
    assert_failed(script, "no whole answer within 0.3 s", seconds=0.3)


def assert_failed(script, error, **target):
    [outcome] = answers(lambda n: script, **target)
    assert outcome.error.startswith(error)
    found = summarize([outcome])
    assert (found["completed"], found["failed"]) == (0, 1)
    assert found["errors"] == {outcome.error: 1}
    assert found["ttftSeconds"] is None


def test_nobody_there_is_a_failure_too():
    target = Target(base_url="http://127.0.0.1:9/v1", model="x")
    [outcome] = asyncio.run(run_load(target, [Planned(0.0, "a", 1)], concurrency=1))
    assert outcome.error.startswith("ConnectError")


def test_no_more_run_at_a_time_than_allowed_and_none_before_it_is_due():
    running, most, changed = 0, 0, threading.Condition()

    def script(n):
        nonlocal running, most
        with changed:
            running += 1
            most = max(most, running)
            changed.notify_all()
            changed.wait_for(
                lambda: most == 3, timeout=PATIENCE
            )  # the first ones wait for each other
        time.sleep(0.02)
        with changed:
            running -= 1
        return [piece("a"), DONE]

    planned = [Planned(0.0, "a", 1)] * 9 + [Planned(0.4, "b", 1)]
    began = time.perf_counter()
    outcomes = answers(script, planned, concurrency=3)
    assert most == 3
    assert max(o.began for o in outcomes) - began >= 0.4


def test_the_request_says_what_was_planned_and_the_key_is_sent():
    with peer(lambda n: [DONE]) as server:
        for chat, ignore in ((False, True), (True, False)):
            target = Target(server.url, "theirs", chat=chat, ignore_eos=ignore, api_key="k")
            asyncio.run(run_load(target, [Planned(0.0, "a b", 5)], concurrency=1))
        assert find_served_model(server.url, "k") == "theirs"
    (path, body, headers), (chat_path, chat_body, _) = server.bodies
    assert (path, body["prompt"], body["max_tokens"]) == ("/v1/completions", "a b", 5)
    assert body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert headers["Authorization"] == "Bearer k"
    assert headers["Accept-Encoding"] == "identity"
    assert (chat_path, chat_body["messages"][0]["content"]) == ("/v1/chat/completions", "a b")
    assert "ignore_eos" not in chat_body


def test_a_server_without_models_is_an_error_that_names_the_option():
    with pytest.raises(ConfigError, match=r"--base-url http://127.0.0.1:9/v1: .*ConnectError"):
        find_served_model("http://127.0.0.1:9/v1", None)


def test_percentiles_are_values_that_occurred():
    outcomes = [
        Outcome(0.0, [float(i)], float(i), prompt_tokens=1, output_tokens=1, counted=True)
        for i in range(1, 101)
    ]
    found = summarize(outcomes)
    assert found["latencySeconds"] == {
        "mean": 50.5,
        "p50": 50.0,
        "p90": 90.0,
        "p95": 95.0,
        "p99": 99.0,
        "max": 100.0,
    }
    assert found["requestsPerSecond"] == 1.0
    assert found["totalTokensPerSecond"] == 2.0
    assert found["tpotSeconds"] is found["itlSeconds"] is None
