"""What cannot be served is refused with the right status, and the server stays up."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace

import pytest
from tests.patience import PATIENCE, eventually, join
from tests.server.asking import chat, complete, error_of
from tests.server.fakes import ByteTokenizer, FakeClient

from kerf_runtime.engine.messages import Failed, Phase


def allow_any_time(http):
    """From now on: else what is asked after a late request could be late as well."""
    http.state.settings = replace(http.state.settings, request_seconds=None)


def send_in_one_piece(http, body, length=None):
    """Head and body at once, on a connection of its own; everything that comes back."""
    address = (http.base_url.host, http.base_url.port)
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {length or len(body)}\r\n\r\n"
    )
    with socket.create_connection(address, timeout=PATIENCE) as connection:
        connection.sendall(head.encode() + body)
        return b"".join(iter(lambda: connection.recv(4096), b""))


def test_invalid_json_is_400_and_says_where(serve):
    http = serve()
    response = http.post(
        "/v1/completions",
        content=b'{"model": "tiny", ',
        headers={"content-type": "application/json"},
    )
    assert "not valid JSON" in error_of(response, 400)["message"]
    assert "character 18" in error_of(response, 400)["message"]
    assert complete(http).status_code == 200


@pytest.mark.parametrize("body", [b"[1]", b'"text"', b"3"])
def test_a_body_that_is_no_object_is_400(serve, body):
    response = serve().post(
        "/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    assert "JSON object" in error_of(response, 400)["message"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"model": "\xff"}', "not UTF-8 at byte 11"),
        (b'{"max_tokens": ' + b"1" * 5000 + b"}", "too many digits"),
        (b'{"model": "tiny", "prompt": "Hi", "\\ud800": 1}', "no valid Unicode"),
    ],
    ids=["deep", "bytes", "digits", "name"],
)
def test_a_body_that_no_parser_reads_is_400_and_says_why(serve, body, words):
    response = serve().post(
        "/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    assert words in error_of(response, 400)["message"]


@pytest.mark.parametrize("body", [b"", b"null"])
def test_no_body_is_400_and_called_that(serve, body):
    for headers in ({"content-type": "application/json"}, {}):
        response = serve().post("/v1/chat/completions", content=body, headers=headers)
        error = error_of(response, 400)
        if not (body and not headers):
            assert "the request has no body. Send a JSON object" in error["message"]


def test_a_body_of_another_type_is_400_and_names_the_type(serve):
    body = b'{"model": "tiny", "prompt": "Hi"}'
    kinds = {"text/plain": "Content-Type 'text/plain'", "": "Content-Type"}
    for kind, words in kinds.items():
        response = serve().post("/v1/completions", content=body, headers={"content-type": kind})
        message = error_of(response, 400)["message"]
        assert words in message
        assert "Send Content-Type: application/json" in message


def test_a_request_that_takes_too_long_is_504_and_aborted(serve):
    client = FakeClient(hold=threading.Event()).make_ready()
    http = serve(client, request_seconds=0.1)
    error = error_of(complete(http), 504)
    assert error["code"] == "timeout"
    assert "within 0.1 seconds" in error["message"]
    assert client.aborted == [request.request_id for request in client.seen]
    stream = complete(http, stream=True)
    assert '"code":"timeout"' in stream.text
    assert "[DONE]" not in stream.text
    eventually(lambda: http.state.outstanding == 0)


class HeldTokenizer(ByteTokenizer):
    """Tokenises long texts, to a few tokens, only while ``go`` is set."""

    def __init__(self):
        super().__init__()
        self.go = threading.Event()
        self.begun = 0

    def encode(self, text, add_special_tokens=True):
        if len(text) > 4096:
            self.begun += 1
            assert self.go.wait(PATIENCE)
        return super().encode(text[:8], add_special_tokens)


LONG = "a" * 5000


@pytest.fixture
def held():
    """Goes on after the test whatever it did: the server waits for its threads."""
    tokenizer = HeldTokenizer()
    yield tokenizer
    tokenizer.go.set()


@pytest.mark.parametrize("ask", [complete, chat])
def test_waiting_for_the_tokens_of_a_prompt_is_a_part_of_the_time_of_a_request(serve, held, ask):
    client = FakeClient().make_ready()
    http = serve(client, request_seconds=0.2)
    http.state.tokenizer = held
    fields = {
        complete: {"prompt": LONG},
        chat: {"messages": [{"role": "user", "content": LONG}]},
    }[ask]
    asked = 0
    while held.begun == 0:  # once, unless its time was over before it began
        asked += 1
        assert error_of(ask(http, **fields), 504)["code"] == "timeout"
        assert http.state.outstanding == 0
    held.go.set()
    allow_any_time(http)
    eventually(lambda: not http.state.long_texts.locked())
    assert 1 <= held.begun <= asked
    assert client.seen == []
    assert complete(http).status_code == 200


def test_texts_that_were_given_up_count_as_tokenised_until_their_threads_are_done(serve, held):
    """Else the memory of any number of them could be taken at once."""
    http = serve(FakeClient().make_ready(), request_seconds=0.1)
    http.state.tokenizer = held
    while held.begun < 4:  # four times, unless the time of one was over before it began
        error_of(complete(http, prompt=LONG), 504)
    for _ in range(2):
        error_of(complete(http, prompt=LONG), 504)
    assert held.begun == 4
    assert http.state.long_texts.locked()
    held.go.set()
    allow_any_time(http)
    eventually(lambda: not http.state.long_texts.locked())
    assert complete(http, prompt=LONG).status_code == 200


def test_requests_hold_their_places_in_the_queue_while_they_are_tokenised(serve, held):
    client = FakeClient().make_ready()
    http = serve(client, max_num_seqs=1, max_queue_len=0)
    http.state.tokenizer = held
    answers = []
    thread = threading.Thread(target=lambda: answers.append(complete(http, prompt=LONG)))
    thread.start()
    eventually(lambda: held.begun == 1)
    assert http.state.outstanding == 1
    assert error_of(complete(http), 429)["code"] == "queue_full"
    held.go.set()
    join(thread)
    assert answers[0].status_code == 200
    eventually(lambda: http.state.outstanding == 0)


def test_bytes_that_are_no_text_are_400(serve):
    response = serve().post(
        "/v1/completions", content=b"\xff\xfe", headers={"content-type": "application/json"}
    )
    error_of(response, 400)


@pytest.mark.parametrize("ask", [complete, chat])
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_tokens": -1}, "max_tokens", "(got -1)"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1 (got 0)"),
        ({"max_tokens": "5"}, "max_tokens", "valid integer"),
        ({"max_tokens": 1.5}, "max_tokens", "integer"),
        ({"max_tokens": True}, "max_tokens", "valid integer"),
        ({"max_tokens": 10**30}, "max_tokens", "tokens were requested"),
        ({"temperature": -0.1}, "temperature", "greater than or equal to 0"),
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"top_p": 1.1}, "top_p", "less than or equal to 1"),
        ({"top_k": -2}, "top_k", "greater than or equal to -1"),
        ({"top_k": 10**20}, "top_k", "less than or equal to"),
        ({"seed": 2**63}, "seed", "less than or equal to"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 129}, "n", "less than or equal to 128"),
        ({"n": 65}, "n", "65 answers in one request (1 prompts, n is 65); at most 64"),
        ({"min_p": 1.5}, "min_p", "less than or equal to 1"),
        ({"min_tokens": -1}, "min_tokens", "greater than or equal to 0"),
        ({"min_tokens": 9, "max_tokens": 5}, "min_tokens", "the answer may have 5 tokens"),
        ({"presence_penalty": 2.5}, "presence_penalty", "less than or equal to 2"),
        ({"frequency_penalty": -3}, "frequency_penalty", "greater than or equal to -2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "greater than or equal to 0.01"),
        ({"logit_bias": {"257": 1}}, "logit_bias", "vocabulary of 257"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "less than or equal to 100"),
        ({"logit_bias": {"05": 1}}, "logit_bias", "'05' is not a token id"),
        ({"logit_bias": {"Hello": 1}}, "logit_bias", "'Hello' is not a token id"),
        ({"logit_bias": [5]}, "logit_bias", "valid dictionary"),
        ({"stop": ""}, "stop", "empty"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"stop": [1]}, "stop.0", "string"),
        ({"stop_token_ids": [257]}, "stop_token_ids", "vocabulary of 257"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", ""),
        ({"best_of": 2}, "best_of", "not supported"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"max_tokns": 5}, "max_tokns", "unknown parameter"),
    ],
)
def test_a_wrong_parameter_is_named(serve, ask, fields, param, words):
    error = error_of(ask(serve(), **fields), 400, param)
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("ask", "fields", "param", "words"),
    [
        (chat, {"logprobs": 1}, "logprobs", "valid boolean"),
        (chat, {"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        (chat, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        (chat, {"echo": True}, "echo", "not supported"),
        (complete, {"logprobs": True}, "logprobs", "valid integer"),
        (complete, {"logprobs": 21}, "logprobs", "less than or equal to 20"),
        (complete, {"top_logprobs": 2}, "top_logprobs", "not supported"),
        (complete, {"n": 3, "best_of": 2}, "best_of", "n is 3"),
        (complete, {"n": 33, "prompt": ["a", "b"]}, "n", "66 answers"),
    ],
)
def test_a_wrong_parameter_of_one_api_is_named(serve, ask, fields, param, words):
    assert words in error_of(ask(serve(), **fields), 400, param)["message"]


@pytest.mark.parametrize("ask", [complete, chat])
def test_neutral_values_of_unsupported_parameters_pass(serve, ask):
    response = ask(
        serve(),
        n=1,
        best_of=1,
        echo=False,
        frequency_penalty=0,
        presence_penalty=0.0,
        logit_bias={},
        logprobs=False,
        top_logprobs=0,
        min_p=0,
        min_tokens=0,
        repetition_penalty=1.0,
        response_format={"type": "text"},
        suffix=None,
        tools=[],
        tool_choice="none",
        user="someone",
        metadata={"a": "b"},
        seed=None,
        stop=None,
        stream=None,
        temperature=None,
    )
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [257]}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
    ],
)
def test_a_wrong_prompt_is_named(serve, fields, param):
    error_of(complete(serve(), **fields), 400, param)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("Hi", "messages"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "robot", "content": "a"}], "messages.0.role"),
        ([{"content": "a"}], "messages.0.role"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages.0.content.0.type",
        ),
        ([{"role": "user", "content": "a", "colour": 1}], "messages.0.colour"),
        (
            [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}],
            "messages.0.tool_calls",
        ),
    ],
)
def test_a_wrong_message_is_named(serve, messages, param):
    error = error_of(chat(serve(), messages=messages), 400)
    assert error["param"].startswith(param)


def test_two_different_limits_are_refused(serve):
    error = error_of(chat(serve(), max_tokens=3, max_completion_tokens=4), 400)
    assert "max_completion_tokens" in error["message"]


def test_a_prompt_above_the_models_limit_is_400_with_both_numbers(serve):
    http = serve()
    error = error_of(complete(http, prompt="x" * 64), 400, "prompt")
    assert "64 tokens, which leaves no room for an answer" in error["message"]
    assert "Shorten it to 63 tokens or less" in error["message"]
    messages = [{"role": "user", "content": "x" * 100}]
    assert "117 tokens" in error_of(chat(http, messages=messages), 400, "messages")["message"]
    assert complete(http).status_code == 200


def test_prompt_and_answer_together_above_the_limit_are_400_with_the_numbers(serve):
    error = error_of(complete(serve(), prompt="x" * 60, max_tokens=5), 400, "max_tokens")
    assert "5 tokens were requested after a prompt of 60 tokens" in error["message"]
    assert "Ask for 4 tokens or less" in error["message"]


@pytest.mark.parametrize("ask", [complete, chat])
def test_an_unknown_model_is_404_and_names_the_one_that_is_served(serve, ask):
    error = error_of(ask(serve(), model="gpt-9"), 404, "model")
    assert error["code"] == "model_not_found"
    assert "'tiny'" in error["message"]


def test_a_missing_model_is_400(serve):
    response = serve().post("/v1/completions", json={"prompt": "a"})
    assert "required" in error_of(response, 400, "model")["message"]


def test_a_full_queue_is_429_with_retry_after_and_recovers(serve):
    client = FakeClient(hold=threading.Event()).make_ready()
    http = serve(client, max_num_seqs=1, max_queue_len=2)
    threads = [threading.Thread(target=complete, args=(http,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    eventually(lambda: len(client.seen) == 3)
    response = complete(http)
    error = error_of(response, 429)
    assert error["code"] == "queue_full"
    assert "maxQueueLen is 2" in error["message"]
    assert int(response.headers["retry-after"]) >= 1
    client.hold.set()
    join(*threads)
    assert complete(http).status_code == 200
    eventually(lambda: http.state.outstanding == 0)
    assert 'kerf_requests_finished_total{model_name="tiny",reason="refused"} 1.0' in (
        http.get("/metrics").text
    )


def test_a_body_above_the_limit_is_413_with_or_without_a_length(serve):
    http = serve(max_body_bytes=1000)
    error = error_of(complete(http, prompt="x" * 2000), 413)
    assert "at most 1000" in error["message"]

    def chunks():
        for _ in range(20):
            yield b"x" * 100

    error_of(http.post("/v1/completions", content=chunks()), 413)
    assert complete(http).status_code == 200


def test_a_body_that_does_not_arrive_is_408_and_its_connection_is_closed(serve):
    client = FakeClient().make_ready()
    http = serve(client, body_seconds=0.2)
    answer = send_in_one_piece(http, b'{"model"', length=1000)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"did not arrive within 0.2 seconds" in answer
    assert client.seen == []
    assert http.get("/ready").status_code == 200


def test_an_answer_may_take_longer_than_a_body(serve):
    client = FakeClient(hold=threading.Event()).make_ready()
    http = serve(client, body_seconds=0.2)
    threading.Timer(0.5, client.hold.set).start()
    assert b'"text":"Hello"' in send_in_one_piece(http, b'{"model": "tiny", "prompt": "Hi"}')


def test_a_dead_engine_is_503(serve):
    client = FakeClient().make_ready()
    http = serve(client)
    client.failed = Failed(kind="EngineError", what="out of memory", hint="Lower maxNumSeqs")
    error = error_of(complete(http), 503)
    assert "out of memory. Lower maxNumSeqs" in error["message"]


def test_an_engine_that_dies_while_it_answers_is_503(serve):
    client = FakeClient(hold=threading.Event()).make_ready()
    http = serve(client)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(complete(http)))
    thread.start()
    eventually(lambda: len(client.seen) == 1)
    client.failed = Failed(kind="EngineError", what="the engine process was killed")
    join(thread)
    assert "was killed" in error_of(answers[0], 503)["message"]


def test_an_engine_that_dies_while_it_streams_ends_the_stream_with_an_error_event(serve):
    client = FakeClient(endless=True).make_ready()
    http = serve(client)
    with http.stream(
        "POST",
        "/v1/completions",
        json={"model": "tiny", "prompt": "a", "stream": True, "max_tokens": 60},
    ) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        client.failed = Failed(kind="EngineError", what="the engine process was killed")
        *_, last = [line for line in lines if line]
    assert '"error"' in last
    assert "was killed" in last


def test_before_the_engine_is_ready_requests_are_503_with_the_phase(serve):
    client = FakeClient(phase=Phase(name="compile", detail="piece 2 of 3"))
    response = complete(serve(client))
    assert "phase compile" in error_of(response, 503)["message"]
    assert response.headers["retry-after"] == "1"


def test_unknown_paths_and_methods_have_the_same_shape(serve):
    http = serve()
    error_of(http.get("/v2/nothing"), 404)
    error_of(http.get("/v1/completions"), 405)


def test_with_an_api_key_only_v1_needs_it(serve):
    http = serve(api_key="secret")
    assert error_of(complete(http), 401)["code"] == "invalid_api_key"
    assert complete_with(http, "Bearer wrong").status_code == 401
    assert complete_with(http, "Bearer secret").status_code == 200
    assert http.get("/ready").status_code == 200


def complete_with(http, authorization):
    return http.post(
        "/v1/completions",
        json={"model": "tiny", "prompt": "a"},
        headers={"authorization": authorization},
    )


def test_every_response_has_a_request_id_and_a_given_one_is_kept(serve):
    http = serve()
    assert http.get("/ready").headers["x-request-id"]
    assert http.get("/ready", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    forged = http.get("/ready", headers={"x-request-id": "a b<script>"})
    assert forged.headers["x-request-id"] != "a b<script>"
