"""Every metric of the runtime: its name, type, labels, buckets and meaning.  ``metrics`` fills them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kerf_runtime.stats import QUEUE_BUCKETS_SECONDS, STEP_BUCKETS_SECONDS

__all__ = ["API_PATHS", "COMPILE_BUCKETS_SECONDS", "METRICS", "MetricSpec"]

LATENCY_BUCKETS_SECONDS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip
TOKEN_BUCKETS_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5,
)  # fmt: skip
COMPILE_BUCKETS_SECONDS = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)

API_PATHS = ("/v1/completions", "/v1/chat/completions")
"""Requests to other paths are not counted: a scanner must not be able to make series."""

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
               "Batch descriptors that were given up, for memory or because capturing failed.",
               ("mode", "reason")),
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
    MetricSpec("kerf_engine_silence_seconds", "gauge",
               "Since the engine's loop last said anything; above 2 it is in a long step, or stuck."),
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
