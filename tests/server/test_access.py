"""One line per request in the log, and an id on every response, that of a bug included."""

from __future__ import annotations

import logging

import pytest
from tests.patience import eventually
from tests.server.fakes import FakeClient

SECRET = "my secret prompt"


@pytest.fixture
def lines(caplog):
    """Messages of the access log."""
    caplog.set_level(logging.INFO, logger="kerf_runtime.access")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "kerf_runtime.access"]


def test_a_request_leaves_one_line_without_prompt_answer_query_or_key(serve, lines):
    http = serve(FakeClient(reply=lambda r: "my secret answer").make_ready(), api_key="sesame")
    response = http.post(
        "/v1/completions?token=hush",
        json={"model": "tiny", "prompt": SECRET, "user": "someone"},
        headers={"x-request-id": "mine", "authorization": "Bearer sesame"},
    )
    assert response.status_code == 200
    eventually(lambda: len(lines()) == 1)
    (line,) = lines()
    start = f"127.0.0.1 POST /v1/completions 200 {len(response.content)} bytes "
    assert line.startswith(start)
    assert line.endswith(" s mine")
    for word in ("secret", "hush", "sesame", "someone"):
        assert word not in line


def test_refusals_are_logged_with_their_status(serve, lines):
    http = serve(api_key="sesame", max_body_bytes=100)
    http.post("/v1/completions", json={"model": "tiny", "prompt": "a"})
    headers = {"authorization": "Bearer sesame"}
    http.post("/v1/completions", content=b"x" * 200, headers=headers)
    http.get("/nothing")
    eventually(lambda: len(lines()) == 3)
    assert [line.split()[3] for line in lines()] == ["401", "413", "404"]


def test_probes_and_scrapes_are_not_worth_a_line(serve, lines):
    http = serve(FakeClient().make_ready(), max_queue_len=9)
    for path in ("/health", "/ready", "/metrics", "/version"):
        http.get(path)
    eventually(lambda: len(lines()) == 1)
    assert "/version" in lines()[0]


def test_a_path_cannot_forge_a_line_or_flood_the_log(serve, lines):
    http = serve(FakeClient().make_ready(), max_queue_len=9)
    http.get("/a%0A127.0.0.1%20GET%20/forged")
    http.get("/" + "x" * 5000)
    eventually(lambda: len(lines()) == 2)
    assert "\n" not in lines()[0]
    assert "/a\\n127" in lines()[0]
    assert len(lines()[1]) < 400


def test_a_bug_is_500_in_the_same_shape_with_the_id_that_the_log_has(serve, lines, caplog):
    client = FakeClient(reply=lambda r: 1 / 0).make_ready()
    response = serve(client).post("/v1/completions", json={"model": "tiny", "prompt": SECRET})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    request_id = response.headers["x-request-id"]
    eventually(lambda: len(lines()) == 1)
    assert lines()[0].split()[3] == "500"
    failures = [r for r in caplog.records if r.name == "kerf_runtime.server.access"]
    assert request_id in failures[0].getMessage()
    assert failures[0].exc_info is not None
