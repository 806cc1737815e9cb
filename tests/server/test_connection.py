"""Below HTTP: connections that say half of something, that nobody reads, or that speak no HTTP at all."""

from __future__ import annotations

import json
import socket
import time
from contextlib import contextmanager

import pytest
from tests.patience import PATIENCE, eventually
from tests.server.fakes import FakeClient

from kerf_runtime.server import connection


def connect(http):
    address = (http.base_url.host, http.base_url.port)
    return socket.create_connection(address, timeout=PATIENCE)


def read_all(peer):
    """Everything until the server closes."""
    return b"".join(iter(lambda: peer.recv(65536), b""))


def ask_for_health(peer):
    peer.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert read_until(peer, b"}").startswith(b"HTTP/1.1 200")


def read_until(peer, end):
    answer = b""
    while not answer.endswith(end):
        if not (part := peer.recv(65536)):
            raise ConnectionError(f"closed after {answer!r}")
        answer += part
    return answer


@contextmanager
def connect_and_ask(http):
    """A connection that was answered once.

    A new one may be closed before its first head is sent, if the machine stops just then. The later heads come in
    one piece: they are there before the server hears of them.
    """
    while True:
        peer = connect(http)
        try:
            ask_for_health(peer)
        except ConnectionError:
            peer.close()
        else:
            break
    with peer:
        yield peer


def send_completion(peer, fields):
    body = json.dumps({"model": "tiny", **fields})
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    peer.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())


def assert_is_cut_off(peer, first, more):
    """Who goes on and on sending ``more`` after ``first`` cannot at some time."""
    began = time.monotonic()
    peer.sendall(first)
    with pytest.raises(OSError):  # noqa: PT012  (which of the writes fails is up to the kernel)
        while time.monotonic() - began < PATIENCE:
            peer.sendall(more)
            time.sleep(0.05)


def error_in(answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.fixture(autouse=True)
def patience_after_a_refusal(monkeypatch):
    """Who was refused may take any time to read the answer."""
    monkeypatch.setattr(connection, "_LINGER_SECONDS", PATIENCE)


@pytest.fixture
def hasty(monkeypatch):
    """Heads must arrive within a quarter of a second."""
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.25)


@pytest.mark.parametrize("before", [0, 1, 2])
def test_half_a_head_is_408_however_slowly_more_of_it_comes(serve, hasty, monkeypatch, before):
    monkeypatch.setattr(connection, "_LINGER_SECONDS", 0.2)
    with connect_and_ask(serve()) if before else connect(serve()) as peer:
        for _ in range(before - 1):
            ask_for_health(peer)
        assert_is_cut_off(peer, b"GET /health HTTP/1.1\r\n", b"x: y\r\n")


def test_the_late_head_is_told_so(serve, hasty):
    with connect_and_ask(serve()) as peer:
        peer.sendall(b"POST /v1/completions HTTP/1.1\r\n")
        status, error = error_in(read_all(peer))
    assert (status, error["code"]) == (408, "request_timeout")
    assert "within 0.25 seconds" in error["message"]


def test_a_connection_that_never_says_anything_is_closed_without_a_word(serve, hasty):
    with connect(serve()) as peer:
        assert read_all(peer) == b""


def test_an_idle_connection_between_requests_is_kept_longer_than_a_head_may_take(serve, hasty):
    with connect_and_ask(serve()) as peer:
        for _ in range(2):
            time.sleep(0.5)
            ask_for_health(peer)


def test_an_answer_may_take_longer_than_a_head(serve, hasty):
    client = FakeClient(endless=True, max_model_len=10**6).make_ready()
    with connect_and_ask(serve(client)) as peer:
        began = time.monotonic()
        send_completion(peer, {"prompt": "a", "max_tokens": 400, "stream": True})
        read_until(peer, b"[DONE]\n\n\r\n0\r\n\r\n")
        assert time.monotonic() - began > 0.3


@pytest.mark.parametrize(
    "content",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"GET /health\r\n\r\n",
        b"GET /health HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 100_000,
        b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: a\x00b\r\n\r\n",
    ],
    ids=lambda content: repr(content[:60]),
)
def test_what_is_no_http_is_400_in_the_usual_shape(serve, content):
    http = serve()
    with connect(http) as peer:
        peer.sendall(content)
        status, error = error_in(read_all(peer))
    assert status == 400
    assert error["message"]
    assert http.get("/ready").status_code == 200


def test_a_client_that_does_not_read_its_answer_is_gone_after_a_while(serve):
    client = FakeClient(endless=True, max_model_len=10**9, per_step=1).make_ready()
    http = serve(client, unread_seconds=1.0)
    with connect(http) as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        send_completion(peer, {"prompt": "a" * 10, "n": 50, "stream": True, "max_tokens": 10**8})
        eventually(lambda: len(client.seen) == 50)
        eventually(lambda: http.state.outstanding == 0)
    assert len(client.aborted) == 50


def test_a_system_that_cannot_watch_peers_serves_all_the_same_and_says_so(caplog):
    with socket.socket(socket.AF_UNIX) as listener:  # knows nothing of TCP
        connection.watch_peers(listener)
    assert "cannot watch the peers" in caplog.text


def test_who_is_refused_while_still_sending_reads_the_answer_all_the_same(serve):
    with connect(serve()) as peer:
        peer.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 70_000)
        time.sleep(0.3)  # refused by now
        for _ in range(20):
            peer.sendall(b"y" * 10_000)
        status, _ = error_in(read_all(peer))
    assert status == 400


def test_who_goes_on_sending_after_a_refusal_is_cut_off(serve, monkeypatch):
    monkeypatch.setattr(connection, "_LINGER_SECONDS", 0.2)
    with connect(serve()) as peer:
        assert_is_cut_off(peer, b"no http\r\n\r\n", b"more\r\n")
