"""The collectors behind ``GET /metrics``; ``metric_table`` says what every metric means.

What the engine counts comes from its latest ``Stats`` and from its start-up report and is turned into
series at scrape time (``EngineCollector``): nothing is counted twice, and nothing is pushed.  What only
the HTTP process can see (latencies, refusals) is observed by ``RequestMetrics``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
from kerf_runtime.metric_table import API_PATHS, COMPILE_BUCKETS_SECONDS, METRICS

__all__ = [
    "EngineCollector",
    "EngineView",
    "RequestMetrics",
    "exposition",
]

Labelled = tuple[tuple[str, ...], float]
"""Label values and the value of one sample."""


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
    """What the collector reads at a scrape: start-up report, latest numbers, and how long none has come."""

    model_name: str
    report: Mapping[str, Any]
    stats: Mapping[str, Any]
    silent_seconds: float = 0.0


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
            yield _gauge("kerf_engine_silence_seconds", [((), view.silent_seconds)])


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
