"""The ``openai`` client against a real engine: what every sampling parameter does to a tiny random model."""

from __future__ import annotations

import concurrent.futures
import math

import openai
import pytest
from tests.patience import eventually
from tests.server.test_metrics import scrape, value
from tests.server.tiny import VOCAB

ASK = {"model": "tiny", "prompt": "abc", "max_tokens": 16}


@pytest.fixture(scope="module")
def client(uncompiled_server):
    url = f"{uncompiled_server.http.base_url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as made:
        yield made


def texts(answer):
    return [choice.text for choice in answer.choices]


def test_three_seeded_answers_repeat_differ_and_start_with_what_one_would_be(client):
    three = texts(client.completions.create(**ASK, n=3, seed=11))
    assert len(set(three)) == 3
    assert texts(client.completions.create(**ASK, n=3, seed=11)) == three
    assert texts(client.completions.create(**ASK, seed=11)) == three[:1]
    other = texts(client.completions.create(**{**ASK, "prompt": ["Hello", "abc"]}, n=3, seed=11))
    assert other[3:] == three


def test_seeded_answers_do_not_depend_on_what_else_runs(client):
    extra = {"repetition_penalty": 1.2, "min_p": 0.01, "min_tokens": 4}
    ask = {**ASK, "seed": 3, "presence_penalty": 0.5, "frequency_penalty": 0.5, "extra_body": extra}
    alone = texts(client.completions.create(**ask))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        others = [pool.submit(client.completions.create, **{**ASK, "n": 2}) for _ in range(6)]
        same = [pool.submit(client.completions.create, **ask) for _ in range(4)]
        assert [texts(future.result()) for future in same] == [alone] * 4
        assert all(len(texts(future.result())) == 2 for future in others)


def test_a_bias_of_a_hundred_forces_a_token_and_minus_a_hundred_bans_it(client):
    forced = client.completions.create(**ASK, logit_bias={"100": 100}, logprobs=0)
    assert len(set(forced.choices[0].logprobs.tokens)) == 1
    greedy = {**ASK, "temperature": 0}
    token = client.completions.create(**greedy, logprobs=0).choices[0].logprobs.tokens[0]
    banned = [str(i) for i in range(VOCAB) if i != 200]
    answer = client.completions.create(
        **greedy, logit_bias=dict.fromkeys(banned, -100), logprobs=0
    ).choices[0]
    assert len(set(answer.logprobs.tokens)) == 1
    assert answer.logprobs.tokens[0] != token


def test_logprobs_are_log_probabilities_and_greedy_takes_the_likeliest(client):
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hi"}],
        temperature=0,
        max_tokens=8,
        logprobs=True,
        top_logprobs=5,
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == 8
    for token in content:
        likeliest = [top.logprob for top in token.top_logprobs]
        assert token.logprob == likeliest[0] == max(likeliest) <= 0
        assert likeliest == sorted(likeliest, reverse=True)
        assert sum(map(math.exp, likeliest)) <= 1.0001


def test_an_echo_has_the_log_probabilities_that_the_model_gave_when_it_wrote_that_text(client):
    bias = {
        str(token): 100 for token in range(70, 80)
    }  # some letters, so that the text has no others
    written = client.completions.create(**ASK, temperature=0, logprobs=2, logit_bias=bias).choices[
        0
    ]
    assert len(written.text) == 16
    ask = {"model": "tiny", "prompt": f"abc{written.text}", "max_tokens": 1, "temperature": 0}
    echoed = client.completions.create(**ask, echo=True, logprobs=2).choices[0]
    assert echoed.text.startswith(f"abc{written.text}")
    rows, wrote = echoed.logprobs, written.logprobs
    assert rows.tokens[:-1] == [*"abc", *wrote.tokens]
    assert rows.token_logprobs[0] is rows.top_logprobs[0] is None
    assert rows.token_logprobs[3:-1] == pytest.approx(wrote.token_logprobs, abs=1e-4)
    assert rows.text_offset[:-1] == list(range(19))
    plain = client.completions.create(**ask, logprobs=2).choices[0]
    assert rows.tokens[-1:] == plain.logprobs.tokens


def test_min_tokens_holds_back_the_end(client):
    ends = {"stop_token_ids": list(range(0, 320, 5))}
    short = client.completions.create(**ASK, seed=1, extra_body=ends)
    longer = client.completions.create(**ASK, seed=1, extra_body={**ends, "min_tokens": 12})
    assert short.usage.completion_tokens < 12 <= longer.usage.completion_tokens


def test_a_stream_of_three_joins_to_the_answers(client):
    ask = {**ASK, "n": 3, "seed": 8, "logprobs": 1}
    whole = client.completions.create(**ask)
    joined, tokens = ["", "", ""], [[], [], []]
    for chunk in client.completions.create(**ask, stream=True):
        choice = chunk.choices[0]
        joined[choice.index] += choice.text
        tokens[choice.index] += choice.logprobs.tokens if choice.logprobs else []
    assert joined == texts(whole)
    assert tokens == [choice.logprobs.tokens for choice in whole.choices]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_of_several_tokens_ends_the_answer_and_frees_its_blocks(
    client, uncompiled_server, stream
):
    letters = {str(token): 100 for token in range(60, 90)}
    ask = {
        **ASK,
        "max_tokens": 60,
        "seed": 4,
        "logit_bias": letters,
        "extra_body": {"ignore_eos": True},
    }
    whole = texts(client.completions.create(**ask))[0]
    assert len(whole) == 60
    stop = whole[20:24]
    made = client.completions.create(**ask, stop=[stop], stream=stream)
    choices = [chunk.choices[0] for chunk in made] if stream else made.choices
    assert "".join(choice.text for choice in choices) == whole[: whole.index(stop)]
    assert choices[-1].finish_reason == "stop"
    http = uncompiled_server.http
    eventually(lambda: value(scrape(http), "kerf_requests_running", model_name="tiny") == 0)
    assert value(scrape(http), "kerf_kv_cache_usage_ratio", model_name="tiny") == 0


def test_a_chat_streams_what_it_answers_with_its_usage_in_the_end(client):
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "Grüße 🌍"}], "seed": 5}
    limit = {"max_completion_tokens": 12, "n": 2}
    plain = client.chat.completions.create(**ask, **limit)
    joined = ["", ""]
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.chat.completions.create(**ask, **limit, **usage)
    for chunk in chunks:
        joined[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert joined == [choice.message.content for choice in plain.choices]
    assert last.usage.completion_tokens == plain.usage.completion_tokens
    assert (
        last.usage.prompt_tokens
        == plain.usage.prompt_tokens
        == len("user: Grüße 🌍\nassistant:".encode())
    )
