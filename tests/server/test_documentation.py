"""The OpenAPI document says what is true, so that programs made from it work."""

from __future__ import annotations

import pytest
from tests.server.fakes import FakeClient

from kerf_runtime.server.documentation import ChatCompletion, Completion, ErrorAnswer

ASK = {
    "/v1/completions": (Completion, {"model": "tiny", "prompt": "a"}),
    "/v1/chat/completions": (
        ChatCompletion,
        {"model": "tiny", "messages": [{"role": "user", "content": "a"}]},
    ),
}


@pytest.fixture(scope="module")
def document(plain_server):
    return plain_server.get("/openapi.json").json()


def test_refusals_have_one_shape_and_none_is_422(document):
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert "422" not in operation["responses"]
            if path.startswith("/v1"):
                schema = operation["responses"]["4XX"]["content"]["application/json"]["schema"]
                assert schema["$ref"].endswith("/ErrorAnswer")


def test_every_path_of_the_api_and_every_parameter_is_described(document):
    assert set(ASK) < set(document["paths"])
    for name in ("CompletionRequest", "ChatRequest"):
        for field, schema in document["components"]["schemas"][name]["properties"].items():
            assert schema.get("description"), (name, field)
    for path in ASK:
        answer = document["paths"][path]["post"]["responses"]["200"]["content"]
        assert set(answer) == {"application/json", "text/event-stream"}


@pytest.mark.parametrize("path", ASK)
@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"logprobs": True}, {"max_tokens": 1}], ids=str)
def test_answers_are_exactly_what_the_models_say(serve, path, fields):
    model, body = ASK[path]
    if path == "/v1/completions" and "logprobs" in fields:
        fields = {"logprobs": 2, "echo": True}
    answer = serve(FakeClient().make_ready()).post(path, json={**body, **fields})
    assert answer.status_code == 200, answer.text
    model.model_validate(answer.json(), strict=True)


def test_refusals_are_exactly_what_the_model_says(serve):
    http = serve()
    for response in (
        http.post("/v1/completions", json={}),
        http.post("/v1/completions", content=b"{"),
        http.get("/v1/models/none"),
        http.get("/nothing"),
        http.get("/v1/completions"),
    ):
        assert 400 <= response.status_code < 500
        ErrorAnswer.model_validate(response.json(), strict=True)
