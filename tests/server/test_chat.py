"""``/v1/chat/completions``: messages, limits, streams."""

from __future__ import annotations

import pytest
from tests.server.fakes import FakeClient
from tests.server.test_completions import events


def ask(http, messages=None, **fields):
    messages = messages or [{"role": "user", "content": "Hi"}]
    return http.post("/v1/chat/completions", json={"model": "tiny", "messages": messages, **fields})


def prompt_of(client):
    return bytes(client.seen[-1].prompt_token_ids).decode()


def test_a_conversation_is_answered(serve):
    client = FakeClient().make_ready()
    body = ask(
        serve(client),
        [
            {"role": "system", "content": "Be brief"},
            {"role": "user", "content": "Hi"},
        ],
    ).json()
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": "Hello",
        "refusal": None,
    }
    assert body["choices"][0]["finish_reason"] == "stop"
    assert prompt_of(client) == "system: Be brief\nuser: Hi\nassistant:"
    assert body["usage"]["prompt_tokens"] == len(prompt_of(client))


def test_content_in_parts_is_joined_and_developer_means_system(serve):
    client = FakeClient().make_ready()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    ask(serve(client), [{"role": "developer", "content": parts}, {"role": "user", "content": "c"}])
    assert prompt_of(client) == "system: ab\nuser: c\nassistant:"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_limit_work(serve, name):
    body = ask(serve(), **{name: 3}).json()
    assert body["choices"][0]["message"]["content"] == "Hel"
    assert body["choices"][0]["finish_reason"] == "length"


def test_without_a_limit_the_answer_may_fill_the_model(serve):
    client = FakeClient(reply=lambda r: "y" * 500, max_model_len=64).make_ready()
    body = ask(serve(client)).json()
    assert body["usage"]["total_tokens"] == 64


def test_a_stream_starts_with_the_role_and_ends_with_a_reason_and_usage(serve):
    response = ask(serve(), stream=True, stream_options={"include_usage": True})
    first, *middle, last, counts = events(response)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["choices"][0]["delta"]["content"] for c in middle) == "Hello"
    assert last["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert counts["usage"]["completion_tokens"] == 6


def test_an_empty_answer_still_streams_a_role_and_a_reason(serve):
    first, last = events(ask(serve(FakeClient(reply=lambda r: "").make_ready()), stream=True))
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert last["choices"][0]["finish_reason"] == "stop"
