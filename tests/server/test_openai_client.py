"""The official ``openai`` client is the judge of the wire format (over a real engine: test_end_to_end)."""

from __future__ import annotations

import openai
import pytest
from tests.server.fakes import FakeClient


@pytest.fixture
def engine():
    return FakeClient(reply=lambda r: "Grüße 🌍!").make_ready()


@pytest.fixture
def client(serve, engine):
    http = serve(engine)
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
    with pytest.raises(openai.BadRequestError, match=r"n: 65 answers in one request") as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, n=65)
    assert (caught.value.param, caught.value.type) == ("n", "invalid_request_error")
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with pytest.raises(openai.BadRequestError, match=r"tools: .*not supported"):
        client.chat.completions.create(model="tiny", messages=MESSAGES, tools=[tool])
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="limit of 64 tokens"):
        client.completions.create(model="tiny", prompt="x" * 99)


def test_three_answers_each_with_a_seed_of_its_own(client, engine):
    ask = {"model": "tiny", "messages": MESSAGES, "seed": 5}
    answer = client.chat.completions.create(n=3, **ask)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {"Grüße 🌍!"}
    tokens = len("Grüße 🌍!".encode()) + 1
    assert answer.usage.completion_tokens == 3 * tokens
    one = client.chat.completions.create(**ask)
    assert answer.usage.prompt_tokens == one.usage.prompt_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    seeds = [request.params.seed for request in engine.seen]
    assert len(set(seeds[:3])) == 3
    assert seeds[0] == seeds[3] == 5


def test_three_answers_stream_side_by_side(client):
    stream = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        n=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = stream
    texts, roles, reasons = ["", "", ""], [0, 0, 0], [None] * 3
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index] += choice.delta.role == "assistant"
        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == ["Grüße 🌍!"] * 3
    assert roles == [1, 1, 1]
    assert reasons == ["stop"] * 3
    assert last.usage.completion_tokens == 3 * (len("Grüße 🌍!".encode()) + 1)


def test_logprobs_of_a_chat_join_to_the_answers_bytes(client):
    ask = {"model": "tiny", "messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    content = client.chat.completions.create(**ask).choices[0].logprobs.content
    assert bytes(b for token in content for b in token.bytes).decode() == "Grüße 🌍!"
    assert content[0].token == "G"
    assert content[0].logprob == pytest.approx(-ord("G") / 1000)
    assert [top.token for top in content[0].top_logprobs] == ["G", "A"]
    assert content[2].token == "bytes:\\xc3"
    chunks = client.chat.completions.create(stream=True, **ask)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    streamed = [token for c in choices if c.logprobs for token in c.logprobs.content]
    assert streamed == content


def test_logprobs_of_a_chat_without_alternatives(client):
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True)
    assert answer.choices[0].logprobs.content[0].top_logprobs == []
    bare = client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert bare.choices[0].logprobs is None


def test_logprobs_of_a_completion(client):
    ask = {"model": "tiny", "prompt": "a", "max_tokens": 20, "logprobs": 1}
    choice = client.completions.create(**ask).choices[0]
    found = choice.logprobs
    assert found.tokens[:3] == ["G", "r", "bytes:\\xc3"]
    assert found.text_offset[:5] == [0, 1, 2, 2, 3]
    assert found.token_logprobs[1] == pytest.approx(-ord("r") / 1000)
    assert found.top_logprobs[0] == {"G": pytest.approx(-ord("G") / 1000)}
    assert len(found.tokens) == len("Grüße 🌍!".encode())
    parts = [c.choices[0].logprobs for c in client.completions.create(stream=True, **ask)]
    assert [token for part in parts if part for token in part.tokens] == found.tokens
    assert [at for part in parts if part for at in part.text_offset] == found.text_offset


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_behind_a_stop_string_have_no_logprobs(client, stream):
    ask = {"model": "tiny", "prompt": "a", "max_tokens": 20, "logprobs": 0, "stop": ["e 🌍"]}
    made = client.completions.create(stream=stream, **ask)
    choices = [chunk.choices[0] for chunk in made] if stream else made.choices
    assert "".join(choice.text for choice in choices) == "Grüß"
    tokens = [token for c in choices if c.logprobs for token in c.logprobs.tokens]
    assert len(tokens) == len("Grüß".encode())


def test_a_logit_bias_and_penalties_reach_the_engine(client, engine):
    client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        logit_bias={"5": -100, "7": 1.5},
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        extra_body={"repetition_penalty": 1.1, "min_p": 0.1, "min_tokens": 3},
    )
    params = engine.seen[0].params
    assert params.logit_bias == ((5, -100.0), (7, 1.5))
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, -0.5)
    assert (params.repetition_penalty, params.min_p, params.min_tokens) == (1.1, 0.1, 3)


def test_an_echo_comes_before_the_answer(client):
    ask = {"model": "tiny", "prompt": ["ab", "c"], "max_tokens": 20, "echo": True}
    texts = [choice.text for choice in client.completions.create(**ask).choices]
    assert texts == ["abGrüße 🌍!", "cGrüße 🌍!"]
    streamed = ["", ""]
    for chunk in client.completions.create(stream=True, **ask):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_with_logprobs_has_those_of_the_prompt_in_front(client, stream):
    ask = {"model": "tiny", "prompt": ["xyü", "c"], "max_tokens": 20, "echo": True, "logprobs": 1}
    made = client.completions.create(stream=stream, **ask)
    texts, found = ["", ""], [[], []]
    for choice in [c for chunk in made for c in chunk.choices] if stream else made.choices:
        texts[choice.index] += choice.text
        if choice.logprobs is not None:
            rows = choice.logprobs
            found[choice.index] += zip(
                rows.tokens, rows.token_logprobs, rows.top_logprobs, rows.text_offset, strict=True
            )
    assert texts == ["xyüGrüße 🌍!", "cGrüße 🌍!"]
    for text, rows in zip(texts, found, strict=True):
        assert len(rows) == len(text.encode())
        assert rows[0][1:3] == (None, None)
        assert all(logprob is not None and top for _, logprob, top, _ in rows[1:])
        for token, _, _, offset in rows:
            assert token.startswith("bytes:") or text[offset] == token
    prompt = found[0]
    assert [row[0] for row in prompt[:4]] == ["x", "y", "bytes:\\xc3", "bytes:\\xbc"]
    assert prompt[1][1] == pytest.approx(-ord("y") / 1000)
    assert prompt[1][2] == {"y": pytest.approx(-ord("y") / 1000)}


def test_an_echo_without_logprobs_asks_the_engine_for_none(client, engine):
    client.completions.create(model="tiny", prompt="a", echo=True)
    client.completions.create(model="tiny", prompt="a", logprobs=2)
    assert [r.params.prompt_logprobs for r in engine.seen] == [False, False]


def test_the_request_id_and_the_key(serve):
    http = serve(api_key="secret")
    url = f"{http.base_url}/v1"
    with openai.OpenAI(base_url=url, api_key="secret", max_retries=0) as right:
        listed = right.models.with_raw_response.list(extra_headers={"X-Request-ID": "mine-1"})
        assert listed.headers["x-request-id"] == "mine-1"
    with openai.OpenAI(base_url=url, api_key="wrong", max_retries=0) as wrong:
        with pytest.raises(openai.AuthenticationError, match="key is missing or wrong") as caught:
            wrong.models.list()
        assert caught.value.request_id
