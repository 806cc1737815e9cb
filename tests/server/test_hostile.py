"""Whatever a client sends, the answer is an answer: never a 500, never a hang, and the server lives on."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kerf_runtime.server.schema import ChatRequest, CompletionRequest

FIELDS = sorted(
    {
        *CompletionRequest.model_fields,
        *ChatRequest.model_fields,
        "logprobs",
        "tools",
        "best_of",
        "x",
    }
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*FIELDS, "role", "content", "type", "text"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)
BODIES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5)
RIGHT = {"model": "tiny", "prompt": "a", "messages": [{"role": "user", "content": "a"}]}


def check(response):
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@settings(max_examples=150, suppress_health_check=list(HealthCheck), deadline=None)
@given(body=BODIES, keep=st.booleans())
def test_any_json_object_is_answered(plain_server, path, body, keep):
    """With ``keep`` only one or two fields of a right request are wrong."""
    content = json.dumps({**RIGHT, **body} if keep else body)
    headers = {"content-type": "application/json"}
    check(plain_server.post(path, content=content, headers=headers))


@settings(max_examples=60, suppress_health_check=list(HealthCheck), deadline=None)
@given(
    content=st.binary(max_size=200), kind=st.sampled_from(["application/json", "text/plain", ""])
)
def test_any_bytes_are_answered(plain_server, content, kind):
    check(plain_server.post("/v1/completions", content=content, headers={"content-type": kind}))


@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000,
        '{"a":' * 50_000,
        '{"model": "tiny", "prompt": ' + "9" * 5000 + "}",
        '{"model": "tiny", "prompt": [' + "1," * 200_000 + "1]}",
        '{"model": "tiny", "prompt": "a", "temperature": NaN}',
        '{"model": "tiny", "prompt": "a", "top_p": Infinity}',
        '{"model": "tiny", "prompt": "a", "max_tokens": 1e400}',
        '{"model": "tiny", "prompt": "\\ud800"}',
        '{"model": "\\ud800", "prompt": "a"}',
        '{"model": "tiny", "prompt": "a", "\\ud800": 1}',
        '{"model": "tiny", "prompt": "a", "stop": "\\ud800"}',
    ],
    ids=lambda text: text[:40],
)
def test_traps_are_refused(plain_server, content):
    headers = {"content-type": "application/json"}
    response = plain_server.post("/v1/completions", content=content, headers=headers)
    assert response.status_code in (400, 404), response.text
    assert plain_server.get("/ready").status_code == 200
