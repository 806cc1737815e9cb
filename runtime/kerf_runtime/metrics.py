"""Every metric of the runtime in one table, and the collectors behind ``GET /metrics``.

``METRICS`` says name, type, labels, buckets and meaning; ``docs/metrics.md`` and the tests read it too.
What the engine counts comes from its latest ``Stats`` and from its start-up report and is turned into
series at scrape time (``EngineCollector``): nothing is counted twice, and nothing is pushed.  What only
the HTTP process can see (latencies, refusals) is observed by ``RequestMetrics``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kerf_runtime.compilation.counters import PASS_COUNTERS
from kerf_runtime.stats import QUEUE_BUCKETS_SECONDS, STEP_BUCKETS_SECONDS

__all__ = [
    "METRICS",
    "EngineCollector",
    "EngineView",
    "MetricSpec",
    "RequestMetrics",
    "exposition",
]

LATENCY_BUCKETS_SECONDS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip
TOKEN_BUCKETS_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5,
)  # fmt: skip
COMPILE_BUCKETS_SECONDS = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)

API_PATHS = ("/v1/completions", "/v1/chat/completions")
"""Requests to other paths are not counted: a scanner must not be able to make series."""

Labelled = tuple[tuple[str, ...], float]
"""Label values and the value of one sample."""

MetricType = Literal["gauge", "counter", "histogram", "info"]


@dataclass(frozen=True)
class MetricSpec:
    """One metric: its name without ``_total``, ``_info`` or ``_bucket``, and what it means."""

    name: str
    type: MetricType
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] | None = None

    @property
    def series(self) -> str:
        """The name that a query uses."""
        suffix = {"counter": "_total", "info": "_info", "histogram": "_bucket", "gauge": ""}
        return self.name + suffix[self.type]


_TABLE = (
    # start-up
    MetricSpec("kerf_startup_phase_duration_seconds", "gauge",
               "Wall time of a start-up phase of the engine.", ("phase",)),
    MetricSpec("kerf_compile_duration_seconds", "histogram",
               "Wall time of a phase of compiling the model.", ("phase",), COMPILE_BUCKETS_SECONDS),
    MetricSpec("kerf_compile_cache_requests", "counter",
               "Look-ups in the compile cache.", ("result", "reason")),
    MetricSpec("kerf_compile_cache_bytes", "gauge",
               "Size of the cache entry in use.", ("key",)),
    MetricSpec("kerf_compile_cache", "info",
               "The key of the compile cache that this process asked for.", ("key",)),
    MetricSpec("kerf_pass_matches", "counter",
               "Places in the graphs compiled by this process that a pass changed.", ("pass",)),
    MetricSpec("kerf_compilations_after_startup", "counter",
               "Compilations that were asked for while serving; must stay 0."),
    MetricSpec("kerf_capture_after_startup", "counter",
               "Graph captures that were asked for while serving; must stay 0."),
    MetricSpec("kerf_effective_config", "info",
               "The configuration in force beside the requested one.",
               ("level", "requested_mode", "effective_mode", "reason", "attention_backend",
                "graph_backend")),
    # static graphs
    MetricSpec("kerf_cudagraph_capture_duration_seconds", "gauge",
               "Time to capture the graphs of one size.", ("mode", "size")),
    MetricSpec("kerf_cudagraph_memory_bytes", "gauge",
               "Memory that the graphs of one size added.", ("mode", "size")),
    MetricSpec("kerf_cudagraph_pool_bytes", "gauge",
               "Memory held by all graphs together."),
    MetricSpec("kerf_cudagraph_shared_bytes", "gauge",
               "Part of that memory that no single graph would give back."),
    MetricSpec("kerf_cudagraph_estimated_bytes", "gauge",
               "Memory that the captured graphs were estimated to hold."),
    MetricSpec("kerf_cudagraph_estimate_error_ratio", "gauge",
               "Estimate minus measured memory, as a part of the measured; within 0.1 of 0."),
    MetricSpec("kerf_cudagraph_graphs", "gauge",
               "Captured batch descriptors.", ("mode",)),
    MetricSpec("kerf_cudagraph_pending_graphs", "gauge",
               "Batch descriptors that a progressive capture has not reached yet."),
    MetricSpec("kerf_cudagraph_capture_delay_seconds", "gauge",
               "Longest time that a progressive capture took between two steps."),
    MetricSpec("kerf_cudagraph_dropped_graphs", "gauge",
               "Batch descriptors that were captured and dropped again.", ("mode", "reason")),
    # steps
    MetricSpec("kerf_dispatch", "counter",
               "Steps by the mode they ran in, the captured size (0 without a graph) and why.",
               ("mode", "size", "reason")),
    MetricSpec("kerf_batches", "counter",
               "Steps by their real tokens, before padding; what `kerf plan sizes` reads.",
               ("tokens",)),
    MetricSpec("kerf_scheduled_tokens", "counter",
               "Real tokens of all steps.", ("mode",)),
    MetricSpec("kerf_padding_tokens", "counter",
               "Rows added to reach the padded size.", ("mode",)),
    MetricSpec("kerf_overlapped_steps", "counter",
               "Steps during which the next one could be prepared and enqueued."),
    MetricSpec("kerf_step_duration_seconds", "histogram",
               "Wall time of one engine step.", ("mode",), STEP_BUCKETS_SECONDS),
    # requests, as the engine sees them
    MetricSpec("kerf_requests_running", "gauge",
               "Requests that take part in steps.", ("model_name",)),
    MetricSpec("kerf_requests_waiting", "gauge",
               "Requests that wait to be scheduled.", ("model_name",)),
    MetricSpec("kerf_request_queue_seconds", "histogram",
               "From arrival at the engine to the first step.", ("model_name",),
               QUEUE_BUCKETS_SECONDS),
    MetricSpec("kerf_prompt_tokens", "counter",
               "Prompt tokens of the requests that were started.", ("model_name",)),
    MetricSpec("kerf_generation_tokens", "counter",
               "Tokens generated.", ("model_name",)),
    MetricSpec("kerf_kv_cache_usage_ratio", "gauge",
               "Blocks of the KV cache in use, 0 to 1.", ("model_name",)),
    MetricSpec("kerf_kv_cache_cached_ratio", "gauge",
               "Blocks of the KV cache that later requests can find, in use or not, 0 to 1.",
               ("model_name",)),
    MetricSpec("kerf_prefix_cache_queries", "counter",
               "Tokens of admitted requests, again after a preemption.", ("model_name",)),
    MetricSpec("kerf_prefix_cache_hits", "counter",
               "Tokens among them that were in the KV cache already.", ("model_name",)),
    MetricSpec("kerf_preemptions", "counter",
               "Requests that lost their blocks to others and start again.", ("model_name",)),
    # requests, as a client sees them
    MetricSpec("kerf_http_requests", "counter",
               "Requests to the completions APIs by the status of the answer; 499: the client left first.",
               ("model_name", "path", "status")),
    MetricSpec("kerf_requests_finished", "counter",
               "Answers by how they ended: stop, length, abort, error; refused: requests above the queue's limit.",
               ("model_name", "reason")),
    MetricSpec("kerf_time_to_first_token_seconds", "histogram",
               "From the request's arrival to its first token.", ("model_name",),
               LATENCY_BUCKETS_SECONDS),
    MetricSpec("kerf_inter_token_latency_seconds", "histogram",
               "Between two tokens of one request.", ("model_name",), TOKEN_BUCKETS_SECONDS),
    MetricSpec("kerf_request_duration_seconds", "histogram",
               "From the request's arrival to its last token.", ("model_name",),
               LATENCY_BUCKETS_SECONDS),
)  # fmt: skip

METRICS: Mapping[str, MetricSpec] = {spec.name: spec for spec in _TABLE}
"""By name."""


class RequestMetrics:
    """What the HTTP process observes itself."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._model_name = model_name
        self._finished = Counter(
            "kerf_requests_finished",
            METRICS["kerf_requests_finished"].help,
            METRICS["kerf_requests_finished"].labels,
            registry=registry,
        )
        self._http = Counter(
            "kerf_http_requests",
            METRICS["kerf_http_requests"].help,
            METRICS["kerf_http_requests"].labels,
            registry=registry,
        )
        for path in API_PATHS:
            self._http.labels(model_name, path, 200)
        for reason in ("stop", "length", "abort", "error", "refused"):
            self._finished.labels(model_name, reason)
        self.time_to_first_token = self._histogram("kerf_time_to_first_token_seconds", registry)
        self.inter_token_latency = self._histogram("kerf_inter_token_latency_seconds", registry)
        self.duration = self._histogram("kerf_request_duration_seconds", registry)

    def answered(self, path: str, status: int) -> None:
        """Count a request that is over, if its path is an API's; ``status`` is 499 without an answer."""
        if path in API_PATHS:
            self._http.labels(self._model_name, path, status).inc()

    def finished(self, reason: str) -> None:
        """Count an answer that ended."""
        self._finished.labels(self._model_name, reason).inc()

    def _histogram(self, name: str, registry: CollectorRegistry) -> Histogram:
        spec = METRICS[name]
        metric = Histogram(
            name, spec.help, spec.labels, buckets=spec.buckets or (), registry=registry
        )
        return metric.labels(self._model_name)


@dataclass(frozen=True)
class EngineView:
    """What the collector reads at a scrape: the start-up report and the latest numbers."""

    model_name: str
    report: Mapping[str, Any]
    stats: Mapping[str, Any]


class EngineCollector(Collector):
    """Series from the engine's report and statistics, made at scrape time."""

    def __init__(self, view: Callable[[], EngineView]) -> None:
        self._view = view

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry then does not collect at registration."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All families that have data."""
        view = self._view()
        if view.report:
            yield from _from_report(view.report)
        if view.stats:
            yield from _from_stats(view.stats, view.model_name)


def exposition(registry: CollectorRegistry, accept: str | None) -> tuple[bytes, str]:
    """Body and content type for a scrape, OpenMetrics if the scraper accepts it."""
    encoder, content_type = choose_encoder(accept or "")
    return encoder(registry), content_type


def _from_report(report: Mapping[str, Any]) -> Iterator[Metric]:
    startup = report.get("startup") or {}
    yield _gauge("kerf_startup_phase_duration_seconds", [((p,), s) for p, s in startup.items()])
    compile_seconds = report.get("compile") or {}
    yield _histogram(
        "kerf_compile_duration_seconds",
        [((phase,), *_observed(seconds)) for phase, seconds in compile_seconds.items()],
    )
    cache = report.get("cache") or {}
    if cache:
        yield _counter(
            "kerf_compile_cache_requests", [((str(cache["result"]), str(cache["reason"])), 1)]
        )
    if cache.get("key"):
        yield _info("kerf_compile_cache", {"key": cache["key"]})
        yield _gauge("kerf_compile_cache_bytes", [((cache["key"],), cache.get("bytes") or 0)])
    effective = report.get("effective") or {}
    if effective:
        yield _info("kerf_effective_config", _effective_labels(effective))
    graphs = report.get("graphs") or {}
    descriptors = graphs.get("descriptors") or []
    yield _gauge("kerf_cudagraph_capture_duration_seconds", _by_size(descriptors, "seconds"))
    yield _gauge("kerf_cudagraph_memory_bytes", _by_size(descriptors, "bytes"))
    yield _gauge("kerf_cudagraph_pool_bytes", [((), graphs.get("memory_bytes") or 0)])
    yield _gauge("kerf_cudagraph_shared_bytes", [((), graphs.get("shared_bytes") or 0)])
    if graphs.get("estimated_bytes") is not None:
        yield _gauge("kerf_cudagraph_estimated_bytes", [((), graphs["estimated_bytes"])])
        yield _gauge("kerf_cudagraph_estimate_error_ratio", [((), graphs["estimate_error"])])
    yield _gauge("kerf_cudagraph_pending_graphs", [((), len(graphs.get("pending") or ()))])
    yield _gauge(
        "kerf_cudagraph_capture_delay_seconds", [((), graphs.get("longest_delay_seconds") or 0)]
    )
    modes: dict[str, int] = dict.fromkeys(("FULL", "PIECEWISE"), 0)
    for descriptor in descriptors:
        modes[descriptor["mode"]] = modes.get(descriptor["mode"], 0) + 1
    yield _gauge("kerf_cudagraph_graphs", [((mode,), count) for mode, count in modes.items()])
    dropped: dict[tuple[str, ...], float] = {}
    for graph in graphs.get("dropped") or []:
        key = (graph["mode"], graph["reason"])
        dropped[key] = dropped.get(key, 0) + 1
    yield _gauge("kerf_cudagraph_dropped_graphs", dropped.items())


def _from_stats(stats: Mapping[str, Any], model: str) -> Iterator[Metric]:
    counters = stats["counters"]
    matches = [((name,), counters[field]) for name, field in PASS_COUNTERS.items()]
    yield _counter("kerf_pass_matches", matches)
    yield _counter(
        "kerf_compilations_after_startup", [((), counters["compilations_after_startup"])]
    )
    yield _counter("kerf_capture_after_startup", [((), counters["captures_after_startup"])])
    yield _counter(
        "kerf_dispatch",
        [((mode, str(size), reason), count) for mode, size, reason, count in stats["dispatch"]],
    )
    yield _counter("kerf_batches", [((str(n),), count) for n, count in stats["batches"]])
    for name, key in (
        ("kerf_scheduled_tokens", "scheduled_tokens"),
        ("kerf_padding_tokens", "padding_tokens"),
    ):
        yield _counter(name, [((mode,), count) for mode, count in stats[key].items()])
    yield _counter("kerf_overlapped_steps", [((), stats["overlapped_steps"])])
    yield _histogram(
        "kerf_step_duration_seconds",
        [((mode,), h["counts"], h["sum"]) for mode, h in stats["step_seconds"].items()],
    )
    yield _gauge("kerf_requests_running", [((model,), stats["requests_running"])])
    yield _gauge("kerf_requests_waiting", [((model,), stats["requests_waiting"])])
    queue = stats["queue_seconds"]
    yield _histogram("kerf_request_queue_seconds", [((model,), queue["counts"], queue["sum"])])
    yield _counter("kerf_prompt_tokens", [((model,), stats["prompt_tokens"])])
    yield _counter("kerf_generation_tokens", [((model,), stats["generation_tokens"])])
    total = stats["kv_blocks_total"]
    for name, key in (
        ("kerf_kv_cache_usage_ratio", "kv_blocks_used"),
        ("kerf_kv_cache_cached_ratio", "kv_blocks_cached"),
    ):
        yield _gauge(name, [((model,), stats[key] / total if total else 0.0)])
    for name in ("prefix_cache_queries", "prefix_cache_hits"):
        yield _counter(f"kerf_{name}", [((model,), stats[name])])
    yield _counter("kerf_preemptions", [((model,), stats["preemptions"])])


def _by_size(descriptors: Sequence[Mapping[str, Any]], field: str) -> list[Labelled]:
    """Sums over the descriptors of one mode and size (decode and mixed can both be FULL)."""
    sums: dict[tuple[str, ...], float] = {}
    for descriptor in descriptors:
        key = (descriptor["mode"], str(descriptor["num_tokens"]))
        sums[key] = sums.get(key, 0) + descriptor[field]
    return list(sums.items())


def _effective_labels(effective: Mapping[str, Any]) -> dict[str, str]:
    reasons = sorted({str(change["reason"]) for change in effective.get("changes") or ()})
    platform = effective.get("platform") or {}
    return {
        "level": str(effective["level"]),
        "requested_mode": str(effective["requested_mode"]),
        "effective_mode": str(effective["mode"]),
        "reason": ",".join(reasons) or "AsRequested",
        "attention_backend": str(platform.get("attention_backend", "")),
        "graph_backend": str(platform.get("graph_backend", "")),
    }


def _gauge(name: str, values: Iterable[Labelled]) -> Metric:
    spec = METRICS[name]
    family = GaugeMetricFamily(name, spec.help, labels=spec.labels)
    for labels, value in values:
        family.add_metric(labels, value)
    return family


def _counter(name: str, values: Iterable[Labelled]) -> Metric:
    spec = METRICS[name]
    family = CounterMetricFamily(name, spec.help, labels=spec.labels)
    for labels, value in values:
        family.add_metric(labels, value)
    return family


def _info(name: str, labels: dict[str, str]) -> Metric:
    family = InfoMetricFamily(name, METRICS[name].help, labels=())
    family.add_metric((), labels)
    return family


def _histogram(
    name: str, values: Iterable[tuple[tuple[str, ...], list[int], float]]
) -> HistogramMetricFamily:
    spec = METRICS[name]
    family = HistogramMetricFamily(name, spec.help, labels=spec.labels)
    for labels, counts, total in values:
        family.add_metric(labels, _cumulative(spec.buckets or (), counts), total)
    return family


def _cumulative(bounds: tuple[float, ...], counts: list[int]) -> list[tuple[str, float]]:
    """Counts per bucket as Prometheus wants them: at most the bound, the last one +Inf."""
    buckets, seen = [], 0
    for bound, count in zip((*map(str, bounds), "+Inf"), counts, strict=True):
        seen += count
        buckets.append((bound, float(seen)))
    return buckets


def _observed(seconds: float) -> tuple[list[int], float]:
    """One observation as bucket counts."""
    counts = [0] * (len(COMPILE_BUCKETS_SECONDS) + 1)
    index = sum(1 for bound in COMPILE_BUCKETS_SECONDS if bound < seconds)
    counts[index] = 1
    return counts, seconds
