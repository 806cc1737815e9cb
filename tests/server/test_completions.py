"""``/v1/completions``: prompts, sampling parameters, limits, streams."""

from __future__ import annotations

import json

import pytest
from tests.server.fakes import FakeClient


def ask(http, **fields):
    return http.post("/v1/completions", json={"model": "tiny", "prompt": "Hi", **fields})


def usage(prompt, completion, cached=0):
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def events(response):
    """Data of the server-sent events of a finished response."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_a_string_is_continued(serve):
    body = ask(serve()).json()
    assert body["object"] == "text_completion"
    assert body["model"] == "tiny"
    assert body["choices"] == [
        {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}
    ]
    assert body["usage"] == usage(2, 6)


def test_a_list_of_tokens_is_one_prompt(serve):
    client = FakeClient().make_ready()
    assert ask(serve(client), prompt=[1, 2, 3]).json()["usage"]["prompt_tokens"] == 3
    assert client.seen[0].prompt_token_ids == [1, 2, 3]


@pytest.mark.parametrize("prompts", [["a", "bb", "ccc"], [[97], [98, 98], [99, 99, 99]]])
def test_a_list_of_prompts_gives_one_choice_each_in_order(serve, prompts):
    client = FakeClient(reply=lambda r: "x" * len(r.prompt_token_ids)).make_ready()
    body = ask(serve(client), prompt=prompts).json()
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "x"), (1, "xx"), (2, "xxx")]
    assert body["usage"] == usage(6, 9)


def test_the_default_of_max_tokens_is_16_and_shrinks_to_what_fits(serve):
    client = FakeClient(reply=lambda r: "y" * 50, max_model_len=24).make_ready()
    http = serve(client)
    body = ask(http).json()
    assert body["choices"][0]["text"] == "y" * 16
    assert body["choices"][0]["finish_reason"] == "length"
    assert ask(http, prompt="z" * 20).json()["choices"][0]["text"] == "y" * 4


def test_sampling_parameters_reach_the_engine(serve):
    client = FakeClient().make_ready()
    http = serve(client)
    ask(
        http,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        seed=42,
        max_tokens=3,
        ignore_eos=True,
        stop_token_ids=[5],
    )
    ask(http, temperature=0, top_k=-1)
    ask(http)
    full, greedy, default = (request.params for request in client.seen)
    assert (full.temperature, full.top_p, full.top_k, full.seed) == (0.5, 0.9, 7, 42)
    assert (full.max_tokens, full.ignore_eos, full.stop_token_ids) == (3, True, (5,))
    assert (greedy.temperature, greedy.top_k) == (0, 0)
    assert (default.temperature, default.top_p, default.seed) == (1.0, 1.0, None)


@pytest.mark.parametrize("per_step", [1, 2, 3, 20])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_wherever_the_steps_cut_it(serve, per_step, stream):
    client = FakeClient(reply=lambda r: "one\n\ntwo\n\nthree", per_step=per_step).make_ready()
    response = ask(serve(client), stop=["\n\nt"], max_tokens=30, stream=stream)
    choices = (
        [choice for e in events(response) for choice in e["choices"]]
        if stream
        else response.json()["choices"]
    )
    assert "".join(choice["text"] for choice in choices) == "one"
    assert choices[-1]["finish_reason"] == "stop"
    if per_step < 20:
        assert client.aborted == [client.seen[0].request_id]


@pytest.mark.parametrize("per_step", [1, 2, 20])
def test_no_stop_string_ends_an_answer_below_min_tokens(serve, per_step):
    client = FakeClient(reply=lambda r: "one two three", per_step=per_step).make_ready()
    body = ask(serve(client), stop=[" "], max_tokens=30, min_tokens=5).json()
    assert body["choices"][0]["text"] == "one two"


@pytest.mark.parametrize("per_step", [1, 2, 20])
def test_a_stop_string_may_begin_below_min_tokens(serve, per_step):
    http = serve(FakeClient(reply=lambda r: "123ab678", per_step=per_step).make_ready())
    for min_tokens, text in ((4, "123"), (5, "123"), (6, "123ab678")):
        fields = {"stop": ["ab"], "max_tokens": 30, "min_tokens": min_tokens}
        [choice] = ask(http, **fields).json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text, "stop")
        streamed = events(ask(http, **fields, stream=True))
        assert "".join(e["choices"][0]["text"] for e in streamed) == text


def test_answers_to_several_prompts_come_prompt_by_prompt(serve):
    client = FakeClient(reply=lambda r: chr(r.prompt_token_ids[0])).make_ready()
    body = ask(serve(client), prompt=["a", "b"], n=2, seed=1).json()
    assert [choice["text"] for choice in body["choices"]] == ["a", "a", "b", "b"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"] == usage(2, 8)
    seeds = [r.params.seed for r in sorted(client.seen, key=lambda r: r.request_id)]
    assert seeds[:2] == seeds[2:]
    assert seeds[0] != seeds[1]


def test_a_stream_joins_to_the_answer_and_ends_with_usage_when_asked(serve):
    client = FakeClient(reply=lambda r: "Grüße, 世界 🌍").make_ready()
    response = ask(
        serve(client), stream=True, stream_options={"include_usage": True}, max_tokens=40
    )
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, last = events(response)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Grüße, 世界 🌍"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert last["choices"] == []
    tokens = len("Grüße, 世界 🌍".encode()) + 1
    assert last["usage"] == usage(2, tokens)


@pytest.mark.parametrize("stream", [False, True])
def test_usage_tells_the_tokens_of_prompts_that_no_answer_had_to_compute(serve, stream):
    # The first of two answers to a prompt computes it, the second finds it.
    found = {"a" * 20: [0, 16], "b" * 40: [32, 16]}

    def cached(request):
        prompt = bytes(request.prompt_token_ids).decode()
        return found[prompt][int(request.request_id.rpartition("-")[2]) % 2]

    client = FakeClient(cached=cached, per_step=2).make_ready()
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    response = ask(serve(client), prompt=list(found), n=2, **options)
    last = events(response)[-1] if stream else response.json()
    assert last["usage"] == usage(60, 24, cached=16)


def test_a_priority_reaches_the_engine_and_has_limits(serve):
    client = FakeClient().make_ready()
    http = serve(client)
    for fields in ({}, {"priority": None}, {"priority": -100}, {"priority": 7, "n": 2}):
        assert ask(http, **fields).status_code == 200
    assert [request.priority for request in client.seen] == [0, 0, -100, 7, 7]
    for wrong in (-101, 101, 1.5, "1"):
        error = ask(http, priority=wrong).json()["error"]
        assert error["param"] == "priority"


def test_a_stream_without_the_option_has_no_usage(serve):
    assert all("usage" not in chunk for chunk in events(ask(serve(), stream=True)))


def test_several_prompts_stream_side_by_side(serve):
    client = FakeClient(reply=lambda r: chr(r.prompt_token_ids[0]) * 5).make_ready()
    texts = {0: "", 1: "", 2: ""}
    for chunk in events(ask(serve(client), prompt=["a", "b", "c"], stream=True)):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {0: "aaaaa", 1: "bbbbb", 2: "ccccc"}
