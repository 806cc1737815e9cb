"""Requests that are dear to check or to answer: probes are answered meanwhile."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import msgspec
import pytest
from tests.patience import PATIENCE, join
from tests.server.fakes import END, FakeClient

from kerf_runtime.engine.messages import AddRequest, TokenLogprobs, TokenOutput
from kerf_runtime.server.responses import answer_response
from kerf_runtime.server.turns import collect_rarely

MIB = 2**20
PROBE_CPU_SECONDS = 2.5
"""Half of what Kubernetes gives a probe of ours. These take up to 0.7, of a CPU that is not the slowest."""


@pytest.fixture(autouse=True, scope="module")
def as_in_a_process_of_its_own() -> Iterator[None]:
    before = gc.get_threshold()
    collect_rarely()
    yield
    gc.set_threshold(*before)


@contextmanager
def probes_answered(base_url: httpx.URL, seconds: float = PROBE_CPU_SECONDS) -> Iterator[None]:
    """Ask ``/health`` all the time; afterwards none of the answers may have cost much work.

    The server is a thread of this process, so whoever holds its event loop while a probe waits spends this
    process's CPU time. What the clock says would count the machine's pauses too.
    """
    over, begun, spent = threading.Event(), threading.Event(), []

    def probe() -> None:
        with httpx.Client(base_url=base_url, timeout=PATIENCE) as http:
            while not over.is_set():
                before = time.process_time()
                assert http.get("/health").status_code == 200
                spent.append(time.process_time() - before)
                begun.set()

    thread = threading.Thread(target=probe)
    thread.start()
    try:
        assert begun.wait(PATIENCE)
        yield
    finally:
        over.set()
        join(thread)
    assert max(spent) < seconds


def test_who_holds_the_event_loop_is_seen(serve):
    def hold(request: AddRequest) -> str:
        end = time.process_time() + 0.5
        while time.process_time() < end:
            pass
        return "Hello"

    http = serve(FakeClient(reply=hold).make_ready())
    seen = pytest.raises(AssertionError, match=r"< 0\.25")
    with seen, probes_answered(http.base_url, seconds=0.25):
        response = http.post("/v1/completions", json={"model": "tiny", "prompt": "a"})
        assert response.status_code == 200


def of_size(head: str, item: str, tail: str) -> str:
    """``item`` repeated until the body has almost 8 MiB."""
    return head + item * ((8 * MIB - len(head) - len(tail)) // len(item)) + tail


COMPLETION = '{"model": "tiny", "prompt": '
CHAT = '{"model": "tiny", "messages": '
BODIES = {
    "token ids": of_size(COMPLETION + "[", "1,", "1]}"),
    "no prompts": of_size(COMPLETION + "[", "null,", "null]}"),
    "empty prompts": of_size(COMPLETION + "[", "[],", "[]]}"),
    "a long text": of_size(COMPLETION + '"', "a b ", '"}'),
    "no stop strings": of_size(COMPLETION + '"a", "stop": [', "null,", "null]}"),
    "no stop tokens": of_size(COMPLETION + '"a", "stop_token_ids": [', "-1,", "-1]}"),
    "no messages": of_size(CHAT + "[", "{},", "{}]}"),
    "empty messages": of_size(CHAT + "[", '{"role":"user","content":""},', "{}]}"),
    "no parts": of_size(CHAT + '[{"role": "user", "content": [', "{},", "{}]}]}"),
    "a long message": of_size(CHAT + '[{"role": "user", "content": "', "a b ", '"}]}'),
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_large_body_is_refused_soon_and_stops_nothing_else(plain_server, body):
    path = "/v1/chat/completions" if body.startswith(CHAT) else "/v1/completions"
    headers = {"content-type": "application/json"}
    with probes_answered(plain_server.base_url):
        response = plain_server.post(path, content=body, headers=headers, timeout=PATIENCE)
    assert response.status_code == 400


class Scripted(FakeClient):
    """A fake engine that says everything in one step, as if the server had been busy meanwhile.

    Args:
        tokens: of every answer, the last one is the end token.
        top: what every token of prompt and answer has as alternatives.
    """

    def __init__(self, tokens: list[int], top: list[tuple[int, float]], **fields: Any) -> None:
        super().__init__(max_model_len=32768, **fields)
        self._tokens = tokens
        self._row = TokenLogprobs(-1.5, top)
        self.make_ready()

    async def generate(self, request: AddRequest) -> AsyncGenerator[TokenOutput, None]:
        row, prompt = self._row, request.prompt_token_ids
        asked = request.params.prompt_logprobs
        yield TokenOutput(
            request.request_id,
            self._tokens,
            "stop",
            None if request.params.logprobs is None else [row] * len(self._tokens),
            prompt_logprobs=[None, *[row] * (len(prompt) - 1)] if asked else None,
        )


def test_a_large_answer_is_sent_in_pieces():
    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "http.disconnect"}

    text = "x" * (5 * MIB)
    response = answer_response({"text": msgspec.Raw(msgspec.json.encode(text)), "n": 1})
    asyncio.run(response({"type": "http", "asgi": {"spec_version": "2.4"}}, receive, send))
    start, *pieces = sent
    content = b"".join(piece["body"] for piece in pieces)
    assert json.loads(content) == {"text": text, "n": 1}
    assert dict(start["headers"])[b"content-length"] == str(len(content)).encode()
    assert max(len(piece["body"]) for piece in pieces) <= MIB


TOP = [(ord("A") + at, -1.23456789 * at) for at in range(20)]


def test_probes_are_answered_while_long_prompts_are_echoed_with_log_probabilities(serve):
    http = serve(Scripted([ord("x"), END], TOP))
    ask = {"model": "tiny", "prompt": [[ord("a")] * 1200] * 64, "echo": True, "logprobs": 20}
    with probes_answered(http.base_url):
        response = http.post("/v1/completions", json=ask, timeout=PATIENCE)
    assert response.status_code == 200
    assert response.content.count(b'"T":') == 64 * 1200
    assert response.headers["content-length"] == str(len(response.content))


def test_probes_are_answered_while_long_answers_of_a_chat_get_log_probabilities(serve):
    http = serve(Scripted([*[ord("x")] * 1200, END], TOP))
    ask = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 20}
    with probes_answered(http.base_url):
        response = http.post(
            "/v1/chat/completions", json={"model": "tiny", "n": 32, **ask}, timeout=PATIENCE
        )
    assert response.status_code == 200
    assert response.content.count(b'"T"') == 32 * 1200


def test_probes_are_answered_while_an_answer_has_no_text(serve):
    http = serve(Scripted([END] * 20_000, TOP[:1]))
    ask = {"model": "tiny", "prompt": "a", "max_tokens": 20_000, "ignore_eos": True}
    with probes_answered(http.base_url):
        response = http.post("/v1/completions", json={**ask, "logprobs": 1}, timeout=PATIENCE)
    [choice] = response.json()["choices"]
    assert choice["text"] == ""
    assert len(choice["logprobs"]["tokens"]) == 19_999
