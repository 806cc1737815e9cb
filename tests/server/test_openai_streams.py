"""Streams as the ``openai`` client sees them: cut anywhere, they join to what a plain answer says."""

from __future__ import annotations

import asyncio

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.server.fakes import FakeClient, running_server

MESSAGES = [{"role": "user", "content": "Hi"}]
TEXT = "naïve 世界 👩‍👩‍👧 é: stop here, STOP there"


@pytest.fixture(scope="module")
def shared():
    """An engine whose answers tests may change, its server's client: starting a server takes a while."""
    engine = FakeClient(max_model_len=200).make_ready()
    with (
        running_server(engine) as (url, _),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield engine, client


@pytest.fixture
def make_client(shared):
    """``make_client(reply=..., per_step=..., endless=...)``: a client of an engine that is like that."""

    def make(reply=lambda r: "Hello", per_step=1, endless=False):
        engine, client = shared
        engine.reply, engine.per_step, engine.endless = reply, per_step, endless
        return client

    return make


def chat_texts(stream):
    return [c.choices[0].delta.content or "" for c in stream if c.choices]


def completion_texts(stream):
    return [c.choices[0].text for c in stream if c.choices]


@pytest.mark.parametrize("per_step", [1, 2, 3, 5, 100])
def test_every_piece_of_a_multi_byte_text_is_whole_characters(make_client, per_step):
    client = make_client(reply=lambda r: TEXT, per_step=per_step)
    ask = {"model": "tiny", "messages": MESSAGES}
    pieces = chat_texts(client.chat.completions.create(**ask, stream=True))
    assert "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)
    assert client.chat.completions.create(**ask).choices[0].message.content == TEXT


@pytest.mark.parametrize("per_step", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("stop", ["STOP", "世界 👩", ["here, S", "nowhere"], "ve 世", "\u200d"])
def test_a_stop_string_that_lies_across_pieces_is_never_shown(make_client, per_step, stop):
    client = make_client(reply=lambda r: TEXT, per_step=per_step)
    first = stop if isinstance(stop, str) else stop[0]
    expected = TEXT[: TEXT.index(first)]
    for create, texts, ask in (
        (client.chat.completions.create, chat_texts, {"messages": MESSAGES}),
        (client.completions.create, completion_texts, {"prompt": "a", "max_tokens": 90}),
    ):
        pieces, reasons = [], []
        for chunk in create(model="tiny", stop=stop, stream=True, **ask):
            pieces += texts([chunk])
            reasons += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
        assert "".join(pieces) == expected
        assert reasons == ["stop"]


ALPHABET = st.text(st.sampled_from("ab世🌍é"), min_size=1, max_size=12)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=ALPHABET, stops=st.lists(ALPHABET, max_size=3), per_step=st.integers(1, 7))
def test_however_it_is_cut_a_stream_says_what_the_plain_answer_says(
    make_client, text, stops, per_step
):
    client = make_client(lambda r: text, per_step=per_step)
    ask = {"model": "tiny", "prompt": "a", "max_tokens": 60, "stop": stops or None}
    plain = client.completions.create(**ask).choices[0]
    pieces = list(client.completions.create(stream=True, **ask))
    assert "".join(completion_texts(pieces)) == plain.text
    assert pieces[-1].choices[0].finish_reason == plain.finish_reason
    ends = [at + len(stop) for stop in stops if (at := text.find(stop)) >= 0]
    assert (plain.text == text) == (not ends)


def test_usage_comes_once_in_a_last_chunk_without_choices_and_only_if_asked_for(make_client):
    client = make_client()
    with_usage = {"stream": True, "stream_options": {"include_usage": True}}
    for create, ask in (
        (client.chat.completions.create, {"messages": MESSAGES}),
        (client.completions.create, {"prompt": "Hi"}),
    ):
        *chunks, last = create(model="tiny", **ask, **with_usage)
        plain = create(model="tiny", **ask)
        assert last.choices == []
        assert last.usage.completion_tokens == plain.usage.completion_tokens == 6
        assert last.usage.prompt_tokens == plain.usage.prompt_tokens
        assert all(chunk.usage is None for chunk in chunks)
        assert len({chunk.id for chunk in [*chunks, last]}) == 1
        for options in (None, {"include_usage": False}):
            chunks = list(create(model="tiny", stream=True, stream_options=options, **ask))
            assert all(chunk.choices for chunk in chunks)


def test_three_answers_with_stop_strings_and_logprobs_are_told_apart_in_one_stream(make_client):
    replies = ["one. two", "uno. dos", "eins. zwei"]
    client = make_client(lambda r: replies[int(r.request_id[-1])], per_step=3)
    texts, tokens, reasons = ["", "", ""], ["", "", ""], {}
    for chunk in client.chat.completions.create(
        model="tiny", messages=MESSAGES, n=3, stop=".", logprobs=True, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            for token in choice.logprobs.content if choice.logprobs else []:
                tokens[choice.index] += token.token
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == tokens == ["one", "uno", "eins"]
    assert reasons == {0: "stop", 1: "stop", 2: "stop"}


def test_the_limit_has_two_names_in_a_chat_and_ends_with_length(make_client):
    client = make_client(endless=True)
    for limit in (
        {"max_completion_tokens": 3},
        {"max_tokens": 3},
        {"max_completion_tokens": 3, "max_tokens": 3},
    ):
        answer = client.chat.completions.create(model="tiny", messages=MESSAGES, **limit)
        assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 3)


def test_the_asynchronous_client_reads_many_streams_at_once(make_client):
    url = make_client(lambda r: "Grüße 🌍!").base_url

    async def read(client) -> str:
        stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    async def read_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
            return await asyncio.gather(*(read(client) for _ in range(20)))

    assert asyncio.run(read_all()) == ["Grüße 🌍!"] * 20


def test_the_clients_helper_for_streams_collects_the_whole_answer(make_client):
    client = make_client()
    with client.chat.completions.stream(model="tiny", messages=MESSAGES) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.delta" in kinds
    assert final.choices[0].message.content == "Hello"
    assert final.choices[0].finish_reason == "stop"
