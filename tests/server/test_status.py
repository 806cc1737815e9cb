"""Probes, version, models and the runtime report."""

from __future__ import annotations

import pytest
from tests.server.fakes import COUNTERS, FakeClient

from kerf_runtime import __version__
from kerf_runtime.engine.failures import error_of
from kerf_runtime.engine.messages import Failed, Phase
from kerf_runtime.stats import EngineStats


def test_while_the_engine_starts_health_is_200_and_ready_is_503_with_the_phase(serve):
    client = FakeClient(phase=Phase(name="compile", detail="piece 2 of 3", fraction=0.5))
    http = serve(client)
    ready = http.get("/ready")
    assert ready.status_code == 503
    assert ready.json() == {"status": "compile", "detail": "piece 2 of 3", "fraction": 0.5}
    assert http.get("/health").status_code == 200


def test_ready_waits_for_the_tokenizer_too(serve):
    client = FakeClient().make_ready()
    http = serve(client)
    tokenizer, http.state.tokenizer = http.state.tokenizer, None
    assert http.get("/ready").json()["status"] == "tokenizer"
    http.state.tokenizer = tokenizer
    assert http.get("/ready").json() == {"status": "ready"}


def test_a_failed_engine_turns_ready_and_health_503_with_the_reason(serve):
    client = FakeClient().make_ready()
    http = serve(client)
    client.failed = Failed(kind="ModelError", what="truncated", where="/model/a.gguf")
    for path in ("/ready", "/health"):
        response = http.get(path)
        assert response.status_code == 503
        assert response.json() == {"status": "failed", "detail": "/model/a.gguf: truncated"}


def test_an_engine_that_is_stuck_in_a_step_is_not_ready_and_may_come_back(serve):
    client = FakeClient(silent_seconds=130.4, is_stalled=True).make_ready()
    http = serve(client)
    ready = http.get("/ready")
    assert ready.status_code == 503
    assert ready.json() == {
        "status": "stalled",
        "detail": "one step has taken 130 seconds so far",
    }
    assert http.get("/health").status_code == 200
    client.is_stalled = False
    assert http.get("/ready").status_code == 200


@pytest.mark.parametrize("kind", ["ModelError", "CacheError", "EngineError", "Nonsense", "os"])
def test_a_failure_becomes_the_error_it_was(kind):
    error = error_of(Failed(kind=kind, what="a", where="b", hint="c"))
    expected = kind if kind in ("ModelError", "CacheError") else "EngineError"
    assert type(error).__name__ == expected
    assert str(error) == "b: a. c"


def test_version(serve):
    assert serve().get("/version").json() == {"version": __version__}


def test_the_one_model_is_listed_and_can_be_fetched(serve):
    http = serve()
    listed = http.get("/v1/models").json()
    assert listed["object"] == "list"
    [model] = listed["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 64)
    assert http.get("/v1/models/tiny").json() == model
    assert http.get("/v1/models/other/name").status_code == 404


def test_the_report_has_its_fixed_part_before_the_engine_is_ready(serve):
    report = serve(FakeClient(phase=Phase(name="weights", detail="3 of 9"))).get("/debug/graphs")
    assert report.json() == {
        "version": __version__,
        "served_name": "tiny",
        "phase": "weights",
        "detail": "3 of 9",
        "ready": False,
        "dispatch": {"FULL": 0, "PIECEWISE": 0, "NONE": 0},
        "dispatch_detail": [],
    }


def test_the_report_folds_the_latest_numbers_into_the_engines_own(serve):
    client = FakeClient().make_ready()
    stats = EngineStats()
    for mode, size, real in (("FULL", 8, 5), ("FULL", 8, 8), ("PIECEWISE", 8, 7), ("NONE", 40, 40)):
        stats.record_step(mode=mode, size=size, reason="Exact", real_tokens=real, seconds=0.01)
    counters = {**COUNTERS, "graph_replays": 3}
    client.stats = stats.to_values(
        counters=counters, graph_hits=[("FULL", 8, True, 2), ("PIECEWISE", 8, False, 1)]
    )
    report = serve(client).get("/debug/graphs").json()
    assert report["ready"] is True
    assert report["phase"] == "ready"
    assert report["cache"]["result"] == "hit"
    assert report["counters"] == counters
    assert report["dispatch"] == {"FULL": 2, "PIECEWISE": 1, "NONE": 1}
    assert {"mode": "FULL", "size": 8, "reason": "Exact", "count": 2} in report["dispatch_detail"]
    hits = {(d["mode"], d["num_tokens"]): d["hits"] for d in report["graphs"]["descriptors"]}
    assert hits == {("FULL", 8): 2, ("PIECEWISE", 8): 1}
    assert report["startup"]["ready"] == 3.0


def test_the_api_describes_itself(serve):
    document = serve().get("/openapi.json").json()
    assert "/v1/chat/completions" in document["paths"]
    assert "max_tokens" in document["components"]["schemas"]["CompletionRequest"]["properties"]
