"""Every metric of the table moves when what it counts happens (with a real engine: test_end_to_end)."""

from __future__ import annotations

import re
import threading
import time

import httpx
import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from tests.patience import PATIENCE, eventually, join
from tests.server.fakes import COUNTERS, FakeClient, running_server

from hack import metrics_docs
from kerf_runtime.engine.messages import Failed
from kerf_runtime.metric_table import METRICS
from kerf_runtime.stats import EngineStats, Histogram


def scrape(http, accept="text/plain"):
    """All samples as {(name, labels): value}, without the moments of creation."""
    response = http.get("/metrics", headers={"accept": accept})
    assert response.status_code == 200
    openmetrics = "openmetrics" in response.headers["content-type"]
    families = (parse_openmetrics if openmetrics else parse_text)(response.text)
    return {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in families
        for s in family.samples
        if not s.name.endswith("_created")
    }


def value(samples, name, **labels):
    return samples[name, tuple(sorted(labels.items()))]


def busy_stats():
    """Statistics of an engine to which everything happened."""
    stats = EngineStats(
        requests_running=2,
        requests_waiting=3,
        kv_blocks_used=25,
        kv_blocks_total=100,
        kv_blocks_cached=50,
        prompt_tokens=11,
        prefix_cache_queries=9,
        prefix_cache_hits=8,
        generation_tokens=7,
        overlapped_steps=6,
        preemptions=4,
    )
    stats.record_step(mode="FULL", size=8, reason="Padded", real_tokens=5, seconds=0.003)
    stats.record_step(mode="NONE", size=40, reason="AboveLargest", real_tokens=40, seconds=100)
    stats.record_queue(0.3)
    counters = {**COUNTERS, "compilations_after_startup": 1, "captures_after_startup": 2}
    counters["norm_quant_matches"] = 4
    return stats.to_values(counters=counters)


@pytest.fixture(scope="module")
def busy():
    """One server for all: nothing here changes it."""
    client = FakeClient().make_ready()
    client.stats = busy_stats()
    client.silent_seconds = 42.0
    with running_server(client) as (url, _), httpx.Client(base_url=url, timeout=PATIENCE) as http:
        yield http


FROM_THE_REPORT = [
    ("kerf_startup_phase_duration_seconds", {"phase": "weights"}, 0.5),
    ("kerf_compile_duration_seconds_count", {"phase": "inductor"}, 1),
    ("kerf_compile_duration_seconds_sum", {"phase": "inductor"}, 12.0),
    ("kerf_compile_duration_seconds_bucket", {"phase": "inductor", "le": "10.0"}, 0),
    ("kerf_compile_duration_seconds_bucket", {"phase": "inductor", "le": "20.0"}, 1),
    ("kerf_compile_cache_requests_total", {"result": "hit", "reason": "Hit"}, 1),
    ("kerf_compile_cache_bytes", {"key": "0123456789abcdef"}, 1234),
    ("kerf_compile_cache_info", {"key": "0123456789abcdef"}, 1),
    (
        "kerf_effective_config_info",
        {
            "level": "3",
            "requested_mode": "FULL",
            "effective_mode": "FULL_AND_PIECEWISE",
            "reason": "AttentionBackendLimit",
            "attention_backend": "reference",
            "graph_backend": "emulated",
        },
        1,
    ),
    ("kerf_cudagraph_capture_duration_seconds", {"mode": "FULL", "size": "8"}, 0.25),
    ("kerf_cudagraph_memory_bytes", {"mode": "PIECEWISE", "size": "8"}, 2048),
    ("kerf_cudagraph_pool_bytes", {}, 4096),
    ("kerf_cudagraph_shared_bytes", {}, 1024),
    ("kerf_cudagraph_estimated_bytes", {}, 4300),
    ("kerf_cudagraph_estimate_error_ratio", {}, 0.05),
    ("kerf_cudagraph_pending_graphs", {}, 2),
    ("kerf_cudagraph_capture_delay_seconds", {}, 0.03),
    ("kerf_cudagraph_graphs", {"mode": "FULL"}, 1),
    ("kerf_cudagraph_dropped_graphs", {"mode": "FULL", "reason": "MemoryBudget"}, 1),
]
FROM_THE_STATISTICS = [
    ("kerf_pass_matches_total", {"pass": "norm_quant_fusion"}, 4),
    ("kerf_pass_matches_total", {"pass": "noop_elimination"}, 0),
    ("kerf_compilations_after_startup_total", {}, 1),
    ("kerf_capture_after_startup_total", {}, 2),
    ("kerf_dispatch_total", {"mode": "FULL", "size": "8", "reason": "Padded"}, 1),
    ("kerf_dispatch_total", {"mode": "NONE", "size": "0", "reason": "AboveLargest"}, 1),
    ("kerf_batches_total", {"tokens": "5"}, 1),
    ("kerf_batches_total", {"tokens": "40"}, 1),
    ("kerf_scheduled_tokens_total", {"mode": "FULL"}, 5),
    ("kerf_padding_tokens_total", {"mode": "FULL"}, 3),
    ("kerf_padding_tokens_total", {"mode": "NONE"}, 0),
    ("kerf_overlapped_steps_total", {}, 6),
    ("kerf_step_duration_seconds_bucket", {"mode": "FULL", "le": "0.002"}, 0),
    ("kerf_step_duration_seconds_bucket", {"mode": "FULL", "le": "0.004"}, 1),
    ("kerf_step_duration_seconds_bucket", {"mode": "NONE", "le": "4.096"}, 0),
    ("kerf_step_duration_seconds_bucket", {"mode": "NONE", "le": "+Inf"}, 1),
    ("kerf_step_duration_seconds_sum", {"mode": "NONE"}, 100),
    ("kerf_engine_silence_seconds", {}, 42),
    ("kerf_requests_running", {"model_name": "tiny"}, 2),
    ("kerf_requests_waiting", {"model_name": "tiny"}, 3),
    ("kerf_request_queue_seconds_bucket", {"model_name": "tiny", "le": "0.5"}, 1),
    ("kerf_prompt_tokens_total", {"model_name": "tiny"}, 11),
    ("kerf_generation_tokens_total", {"model_name": "tiny"}, 7),
    ("kerf_kv_cache_usage_ratio", {"model_name": "tiny"}, 0.25),
    ("kerf_kv_cache_cached_ratio", {"model_name": "tiny"}, 0.5),
    ("kerf_prefix_cache_queries_total", {"model_name": "tiny"}, 9),
    ("kerf_prefix_cache_hits_total", {"model_name": "tiny"}, 8),
    ("kerf_preemptions_total", {"model_name": "tiny"}, 4),
]


@pytest.mark.parametrize(("name", "labels", "expected"), FROM_THE_REPORT + FROM_THE_STATISTICS)
def test_the_engines_numbers_become_series(busy, name, labels, expected):
    assert value(scrape(busy), name, **labels) == expected


REQUEST_METRICS = {
    "kerf_http_requests_total",
    "kerf_requests_finished_total",
    "kerf_time_to_first_token_seconds_bucket",
    "kerf_inter_token_latency_seconds_bucket",
    "kerf_request_duration_seconds_bucket",
}


def test_every_metric_of_the_table_is_exported_and_no_other(busy):
    exported = {name for name, _ in scrape(busy)}
    names = {spec.series for spec in METRICS.values()}
    assert names <= exported
    extra = {re.sub(r"_(sum|count|bucket)$", "_bucket", name) for name in exported} - names
    assert extra == set()


def test_every_metric_of_the_table_is_covered_by_a_test_here():
    tested = {
        re.sub(r"_(sum|count|bucket)$", "_bucket", name)
        for name, _, _ in FROM_THE_REPORT + FROM_THE_STATISTICS
    }
    assert {spec.series for spec in METRICS.values()} == tested | REQUEST_METRICS


def test_names_follow_the_rules():
    for spec in METRICS.values():
        assert re.fullmatch(r"kerf_[a-z0-9_]+", spec.name)
        assert spec.help.endswith(".")
        assert (spec.buckets is not None) == (spec.type == "histogram")
        assert not re.search(r"_(ms|percent|avg|rate|mb)(_|$)", spec.name)


def test_openmetrics_and_text_give_the_same_numbers(busy):
    accept = "application/openmetrics-text; version=1.0.0"
    response = busy.get("/metrics", headers={"accept": accept})
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")
    assert scrape(busy, accept) == scrape(busy)


def test_two_descriptors_of_one_mode_and_size_are_one_series(serve):
    client = FakeClient().make_ready()
    graphs = client.started.report["graphs"]
    both = [{**d, "mode": "FULL"} for d in graphs["descriptors"]]
    report = {**client.started.report, "graphs": {**graphs, "descriptors": both}}
    client.started = msgspec.structs.replace(client.started, report=report)
    samples = scrape(serve(client))
    assert value(samples, "kerf_cudagraph_memory_bytes", mode="FULL", size="8") == 4096
    assert value(samples, "kerf_cudagraph_graphs", mode="FULL") == 2


def test_before_the_engine_has_reported_only_request_metrics_are_exported(serve):
    assert {name for name, _ in scrape(serve(FakeClient()))} == {
        name.replace("_bucket", suffix)
        for name in REQUEST_METRICS
        for suffix in ("_bucket", "_sum", "_count")
    }


def test_requests_are_counted_by_the_status_of_their_answer_and_each_of_their_answers_by_its_end(
    serve,
):
    http = serve(FakeClient(reply=lambda r: "x" * 5).make_ready())
    ask = {"model": "tiny", "prompt": ["a", "b"], "n": 2}
    for fields in ({}, {"max_tokens": 2}, {"stream": True}, {"n": 0}, {"model": "other"}):
        http.post("/v1/completions", json={**ask, **fields})
    http.get("/v1/completions")
    http.post("/v1/nothing")
    samples = scrape(http)
    path = {"model_name": "tiny", "path": "/v1/completions"}
    counted = {
        status: value(samples, "kerf_http_requests_total", status=status, **path)
        for status in ("200", "400", "404", "405")
    }
    assert counted == {"200": 3, "400": 1, "404": 1, "405": 1}
    assert not any("nothing" in str(labels) for _, labels in samples)
    ends = {
        reason: value(samples, "kerf_requests_finished_total", model_name="tiny", reason=reason)
        for reason in ("stop", "length", "abort", "error", "refused")
    }
    assert ends == {"stop": 8, "length": 4, "abort": 0, "error": 0, "refused": 0}


def test_a_finished_request_moves_the_latencies(serve):
    client = FakeClient(reply=lambda r: "abc").make_ready()
    http = serve(client)
    before = scrape(http)
    assert value(before, "kerf_time_to_first_token_seconds_count", model_name="tiny") == 0
    began = time.perf_counter()
    http.post("/v1/completions", json={"model": "tiny", "prompt": "a"})
    took = time.perf_counter() - began
    samples = scrape(http)
    counts = {
        "kerf_time_to_first_token_seconds_count": 1,
        "kerf_inter_token_latency_seconds_count": 3,
        "kerf_request_duration_seconds_count": 1,
    }
    for name, expected in counts.items():
        assert value(samples, name, model_name="tiny") == expected
        total = value(samples, name.replace("_count", "_sum"), model_name="tiny")
        assert 0 < total <= took


@pytest.mark.parametrize(
    ("reason", "fields"),
    [("stop", {}), ("length", {"max_tokens": 2}), ("stop", {"stop": "ll"})],
)
def test_requests_are_counted_by_how_they_ended(serve, reason, fields):
    http = serve(FakeClient().make_ready())
    http.post("/v1/completions", json={"model": "tiny", "prompt": "a", **fields})
    samples = scrape(http)
    finished = {
        dict(labels)["reason"]: count
        for (name, labels), count in samples.items()
        if name == "kerf_requests_finished_total"
    }
    expected = dict.fromkeys(("stop", "length", "abort", "error", "refused"), 0)
    assert finished == expected | {reason: 1}


def test_a_request_that_an_engine_failure_ends_counts_as_error(serve):
    client = FakeClient(hold=threading.Event()).make_ready()
    http = serve(client)
    body = {"model": "tiny", "prompt": "a"}
    thread = threading.Thread(target=http.post, args=("/v1/completions",), kwargs={"json": body})
    thread.start()
    eventually(lambda: len(client.seen) == 1)
    client.failed = Failed(kind="EngineError", what="gone")
    join(thread)
    labels = {"model_name": "tiny", "reason": "error"}
    assert value(scrape(http), "kerf_requests_finished_total", **labels) == 1


@pytest.mark.parametrize(
    ("seconds", "index"), [(0.0, 0), (1.0, 0), (1.5, 1), (2.0, 1), (2.1, 2), (1e9, 2)]
)
def test_a_histogram_counts_up_to_and_including_its_bounds(seconds, index):
    histogram = Histogram((1.0, 2.0))
    histogram.observe(seconds)
    assert histogram.counts == [int(i == index) for i in range(3)]
    assert histogram.sum == seconds


def test_the_document_is_the_one_that_the_table_gives():
    assert metrics_docs.TARGET.read_text() == metrics_docs.render()
