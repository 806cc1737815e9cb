"""The official ``openai`` client is the judge of the wire format (over a real engine: test_end_to_end)."""

from __future__ import annotations

import openai
import pytest
from tests.server.fakes import FakeClient


@pytest.fixture
def client(serve):
    http = serve(FakeClient(reply=lambda r: "Grüße 🌍!").make_ready())
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as made:
        yield made


MESSAGES = [{"role": "user", "content": "Hi"}]


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "kerf"


def test_a_chat(client):
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, seed=1)
    assert answer.choices[0].message.content == "Grüße 🌍!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_chat_stream_with_usage(client):
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "Grüße 🌍!"
    assert chunks[-1].usage.completion_tokens == len("Grüße 🌍!".encode()) + 1
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"


def test_a_stream_that_is_left_early(client):
    with client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True) as stream:
        assert next(iter(stream)).choices[0].delta.role == "assistant"


def test_completions_of_several_prompts_and_a_stop_string(client):
    answer = client.completions.create(
        model="tiny", prompt=["a", "b"], stop=[" "], max_tokens=20, extra_body={"top_k": 5}
    )
    assert [choice.text for choice in answer.choices] == ["Grüße", "Grüße"]
    stream = client.completions.create(model="tiny", prompt="a", stream=True, max_tokens=20)
    assert "".join(chunk.choices[0].text for chunk in stream) == "Grüße 🌍!"


def test_refusals_arrive_as_the_clients_own_exceptions(client):
    with pytest.raises(openai.BadRequestError, match=r"n: .*should be 1"):
        client.chat.completions.create(model="tiny", messages=MESSAGES, n=3)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="64 tokens for"):
        client.completions.create(model="tiny", prompt="x" * 99)
