"""``max_tokens`` 0 with ``echo``: the prompt and its log probabilities, as evaluation harnesses ask for them."""

from __future__ import annotations

import pytest
from tests.server.asking import complete, error_of
from tests.server.fakes import FakeClient


@pytest.fixture
def client():
    return FakeClient().make_ready()


def test_the_prompt_is_told_with_its_log_probabilities_and_nothing_else(serve, client):
    body = complete(serve(client), prompt="ab", max_tokens=0, echo=True, logprobs=1).json()
    [choice] = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert choice["logprobs"]["tokens"] == ["a", "b"]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"] == [0, 1]
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (2, 0, 2)
    assert [request.params.max_tokens for request in client.seen] == [1]


def test_a_stream_tells_the_same_in_one_piece(serve, client):
    ask = {"prompt": ["ab", "c"], "max_tokens": 0, "echo": True, "stream": True}
    text = complete(serve(client), **ask, stream_options={"include_usage": True}).text
    assert text.count('"text":"ab"') == text.count('"text":"c"') == 1
    assert text.count('"finish_reason":"length"') == 2
    assert '"completion_tokens":0' in text


@pytest.mark.parametrize("fields", [{}, {"echo": False}, {"logprobs": 1}])
def test_without_echo_nothing_would_be_answered(serve, client, fields):
    error = error_of(complete(serve(client), max_tokens=0, **fields), 400, "max_tokens")
    assert "greater than or equal to 1 (got 0)" in error["message"]
    assert client.seen == []


def test_at_least_as_many_tokens_as_none_are_too_many(serve, client):
    response = complete(serve(client), max_tokens=0, echo=True, min_tokens=1)
    assert "min_tokens is 1" in error_of(response, 400, "min_tokens")["message"]


@pytest.mark.parametrize("prompt", ["x" * 64, [ord("x")] * 64], ids=["text", "tokens"])
def test_a_prompt_alone_may_fill_the_model(serve, client, prompt):
    body = complete(serve(client), prompt=prompt, max_tokens=0, echo=True, logprobs=0).json()
    [choice] = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("x" * 64, "length")
    assert len(choice["logprobs"]["tokens"]) == body["usage"]["total_tokens"] == 64


def test_a_longer_prompt_alone_is_refused_without_a_word_of_an_answer(serve, client):
    response = complete(serve(client), prompt="x" * 65, max_tokens=0, echo=True)
    message = error_of(response, 400, "prompt")["message"]
    assert "the prompt has 65 tokens, above the model's limit of 64 tokens" in message
    assert "Shorten it to 64 tokens or less" in message
    assert client.seen == []
