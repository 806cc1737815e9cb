"""Bodies of the largest size that is allowed, made of what is dearest to check: probes are answered meanwhile."""

from __future__ import annotations

import threading
import time

import httpx
import pytest

MIB = 2**20


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
    over, waits = threading.Event(), []

    def probe() -> None:
        with httpx.Client(base_url=plain_server.base_url, timeout=60) as http:
            while not waits or not over.is_set():
                began = time.monotonic()
                assert http.get("/health").status_code == 200
                waits.append(time.monotonic() - began)

    thread = threading.Thread(target=probe)
    thread.start()
    try:
        headers = {"content-type": "application/json"}
        response = plain_server.post(path, content=body, headers=headers, timeout=60)
    finally:
        over.set()
        thread.join(60)
    assert response.status_code == 400
    # Millions of errors took a minute and a half; a second is what reading so much JSON takes.
    assert max(waits) < 30
