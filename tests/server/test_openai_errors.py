"""What cannot be served reaches the ``openai`` client as the exception that its users know."""

from __future__ import annotations

import threading

import openai
import pytest
from tests.patience import PATIENCE, eventually, join
from tests.server.fakes import FakeClient

from kerf_runtime.engine.messages import Failed, Phase

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def make_client(serve):
    """``make_client(engine, retries)``: an ``openai`` client of a server over that engine."""
    made = []

    def make(engine, *, retries=0, timeout=PATIENCE, **settings):
        http = serve(engine, **settings)
        client = openai.OpenAI(
            base_url=f"{http.base_url}/v1", api_key="none", max_retries=retries, timeout=timeout
        )
        made.append(client)
        return client

    yield make
    for client in made:
        client.close()


@pytest.fixture(scope="module")
def client(plain_server):
    """Of a server that nothing here changes."""
    url = f"{plain_server.base_url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as made:
        yield made


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"suffix": "end"}, "suffix", "not supported by this server. Leave it out"),
        ({"best_of": 3}, "best_of", "ranking answers is not supported"),
        ({"best_of": 3, "n": 2}, "best_of", "choose among n answers by their logprobs"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"temperature": 2.5}, "temperature", "less than or equal to 2"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"logit_bias": {"9999": 1}}, "logit_bias", "vocabulary of 257"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only allowed with stream"),
        ({"extra_body": {"guided_regex": "a*"}}, "guided_regex", "unknown parameter"),
    ],
)
def test_a_wrong_parameter_of_a_completion_is_a_bad_request_that_names_it(
    client, fields, param, words
):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="a", **fields)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert words in caught.value.message
    assert caught.value.request_id


@pytest.mark.parametrize(
    "fields",
    [{"suffix": ""}, {"suffix": None}, {"best_of": 1}, {"best_of": 2, "n": 2}, {"echo": False}],
    ids=str,
)
def test_values_that_ask_for_nothing_pass(client, fields):
    answer = client.completions.create(model="tiny", prompt="a", **fields)
    assert {choice.text for choice in answer.choices} == {"Hello"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
                ]
            },
            "messages.0.content.0.type",
        ),
        ({"messages": []}, "messages"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_a_chat_cannot_do_is_a_bad_request_that_names_it(client, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, **fields})
    assert caught.value.param == param


def test_a_model_that_is_not_served_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-9", prompt="a")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError, match="does not exist here"):
        client.models.retrieve("gpt-9")


def test_a_body_above_the_limit_is_413(make_client):
    client = make_client(FakeClient().make_ready(), max_body_bytes=1000)
    with pytest.raises(openai.APIStatusError, match="at most 1000 are allowed") as caught:
        client.completions.create(model="tiny", prompt="a" * 2000)
    assert (caught.value.status_code, caught.value.code) == (413, "request_too_large")


def test_a_full_queue_is_a_rate_limit_that_the_client_waits_for(make_client):
    engine = FakeClient(hold=threading.Event()).make_ready()
    impatient = make_client(engine, max_num_seqs=1, max_queue_len=0)
    patient = impatient.with_options(max_retries=20)
    answers = []
    ask = {"model": "tiny", "prompt": "a"}
    first = threading.Thread(target=lambda: answers.append(impatient.completions.create(**ask)))
    first.start()
    eventually(lambda: len(engine.seen) == 1)
    with pytest.raises(openai.RateLimitError) as caught:
        impatient.completions.create(**ask)
    assert caught.value.code == "queue_full"
    assert caught.value.response.headers["retry-after"] == "1"
    second = threading.Thread(target=lambda: answers.append(patient.completions.create(**ask)))
    second.start()
    engine.hold.set()
    join(first, second)
    assert [answer.choices[0].text for answer in answers] == ["Hello", "Hello"]


def test_a_server_that_starts_is_an_internal_error_that_the_client_waits_for(make_client):
    engine = FakeClient(phase=Phase(name="compile"))
    client = make_client(engine)
    with pytest.raises(openai.InternalServerError, match="phase compile") as caught:
        client.completions.create(model="tiny", prompt="a")
    assert caught.value.status_code == 503
    threading.Timer(0.3, engine.make_ready).start()
    patient = client.with_options(max_retries=20)
    assert patient.completions.create(model="tiny", prompt="a").choices[0].text == "Hello"


def test_a_client_that_gives_up_aborts_what_it_asked_for(make_client):
    engine = FakeClient(hold=threading.Event()).make_ready()
    client = make_client(engine, timeout=0.3)
    while len(engine.seen) < 3:  # once, unless it gave up before it was heard
        with pytest.raises(openai.APITimeoutError):
            client.chat.completions.create(model="tiny", messages=MESSAGES, n=3)
    eventually(lambda: len(engine.aborted) == len(engine.seen))


def test_a_request_that_takes_too_long_for_the_server_is_504(make_client):
    engine = FakeClient(hold=threading.Event()).make_ready()
    client = make_client(engine, request_seconds=0.2)
    with pytest.raises(openai.InternalServerError, match=r"within 0\.2 seconds") as caught:
        client.completions.create(model="tiny", prompt="a")
    assert caught.value.status_code == 504


def test_an_engine_that_dies_in_the_middle_of_a_stream_is_an_api_error(make_client):
    engine = FakeClient(endless=True, max_model_len=10**6).make_ready()
    client = make_client(engine)
    stream = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    iterator = iter(stream)
    next(iterator)
    engine.failed = Failed(kind="EngineError", what="the engine process was killed")
    with pytest.raises(openai.APIError, match="the engine process was killed"):
        for _ in iterator:
            pass
