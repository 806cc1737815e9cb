"""A client that goes away aborts what it asked for, whatever it was doing."""

from __future__ import annotations

import re
import socket
import threading
from urllib.parse import urlparse

import pytest
from tests.patience import PATIENCE, eventually
from tests.server.fakes import FakeClient


def send_and_leave(http, path, body, *, read=b""):
    """Send a request on a bare socket, read until ``read`` was seen, and close the connection."""
    url = urlparse(str(http.base_url))
    with socket.create_connection((url.hostname, url.port), timeout=PATIENCE) as connection:
        payload = body.encode()
        connection.sendall(
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(payload)}\r\n\r\n".encode()
            + payload
        )
        seen = b""
        while read not in seen:
            seen += connection.recv(4096)
        yield
    yield


BODY = '{"model": "tiny", "prompt": ["a", "b"], "stream": %s, "max_tokens": 60}'


@pytest.mark.parametrize("stream", ["true", "false"])
def test_leaving_before_the_first_token_aborts_every_prompt(serve, stream):
    client = FakeClient(hold=threading.Event()).make_ready()
    http = serve(client)
    steps = send_and_leave(http, "/v1/completions", BODY % stream)
    next(steps)
    eventually(lambda: len(client.seen) == 2)
    assert http.state.outstanding == 2
    next(steps)
    eventually(lambda: len(client.aborted) == 2)
    eventually(lambda: http.state.outstanding == 0)
    assert 'reason="abort"} 2.0' in http.get("/metrics").text


def test_leaving_in_the_middle_of_a_stream_aborts_it(serve):
    client = FakeClient(endless=True, max_model_len=10**6).make_ready()
    http = serve(client)
    body = '{"model": "tiny", "prompt": "a", "stream": true, "max_tokens": 900000}'
    steps = send_and_leave(http, "/v1/completions", body, read=b"data: ")
    next(steps)
    next(steps)
    eventually(lambda: client.aborted == [client.seen[0].request_id])
    eventually(lambda: http.state.outstanding == 0)


def test_leaving_while_sending_the_body_reaches_no_engine(serve):
    client = FakeClient().make_ready()
    http = serve(client)
    url = urlparse(str(http.base_url))
    with socket.create_connection((url.hostname, url.port), timeout=PATIENCE) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b'Content-Length: 1000\r\n\r\n{"model"'
        )
    assert http.get("/ready").status_code == 200
    assert client.seen == []


def test_an_answer_that_was_never_begun_is_counted_as_aborted_too(serve):
    """The client is gone before its answers' tasks have run for the first time."""
    client = FakeClient(hold=threading.Event()).make_ready()
    http = serve(client)
    for _ in range(20):
        steps = send_and_leave(http, "/v1/completions", BODY % "false")
        next(steps)
        next(steps)

    def counted() -> tuple[int, ...]:
        text = http.get("/metrics").text
        ends = re.findall(r'kerf_requests_finished_total\{.*reason="abort"\} (\d+)', text)
        gone = re.findall(r'kerf_http_requests_total\{.*status="499"\} (\d+)', text)
        return (int(ends[0]), *map(int, gone))

    eventually(lambda: counted() == (40, 20))
    assert len(client.aborted) == len(client.seen)


def test_two_hundred_clients_that_leave_at_once_leave_nothing_running(serve):
    client = FakeClient(endless=True, max_model_len=10**6).make_ready()
    http = serve(client)
    body = '{"model": "tiny", "prompt": "a", "stream": true, "max_tokens": 900000}'
    visits = [send_and_leave(http, "/v1/completions", body) for _ in range(200)]
    for visit in visits:
        next(visit)
    eventually(lambda: len(client.seen) == 200)
    for visit in visits:
        next(visit)
    eventually(lambda: len(client.aborted) == 200)
    eventually(lambda: http.state.outstanding == 0)
