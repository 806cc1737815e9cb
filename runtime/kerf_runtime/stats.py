"""What the engine counts: the contract of ``messages.Stats.values``.  Pure, no torch, no prometheus.

The engine process fills an ``EngineStats`` while it steps and sends ``to_values()`` whenever numbers
changed; ``kerf_runtime.metrics`` in the HTTP process turns the latest values into series.  Every number
only grows since the process started, except the gauges in the first group.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "EXACT_BATCH_TOKENS",
    "NO_SIZE",
    "QUEUE_BUCKETS_SECONDS",
    "STEP_BUCKETS_SECONDS",
    "EngineStats",
    "Histogram",
    "batch_bucket",
]

STEP_BUCKETS_SECONDS: tuple[float, ...] = (
    0.0005,
    0.001,
    0.002,
    0.004,
    0.008,
    0.016,
    0.032,
    0.064,
    0.128,
    0.256,
    0.512,
    1.024,
    2.048,
    4.096,
)
"""Upper bounds of ``kerf_step_duration_seconds``: 0.3 ms on a GPU to seconds of prefill on a CPU."""

QUEUE_BUCKETS_SECONDS: tuple[float, ...] = (0.001, 0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 15.0, 60.0)
"""Upper bounds of ``kerf_request_queue_seconds``: from at once to a minute behind long prompts."""

NO_SIZE = 0
"""The size of a step that ran without a graph: its own tokens would make a series of every number."""

EXACT_BATCH_TOKENS = 512
"""Batches of up to this many tokens are counted by their exact number."""


def batch_bucket(tokens: int) -> int:
    """The number of tokens that a batch is counted under: its own, or the next of eight per octave.

    At most an eighth above the truth, and at most 568 different ones for steps of up to 65536 tokens.
    """
    if tokens <= EXACT_BATCH_TOKENS:
        return tokens
    step = 1 << ((tokens - 1).bit_length() - 4)
    return -(-tokens // step) * step


@dataclass
class Histogram:
    """Counts per bucket and the sum, mergeable over a process border.

    ``counts[i]`` are observations in ``(bounds[i-1], bounds[i]]``; the last one is above every bound.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


@dataclass
class EngineStats:
    """The engine's numbers; one object per engine, changed only by its loop."""

    requests_running: int = 0
    requests_waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    kv_blocks_cached: int = 0
    """Blocks whose contents a later request can find, in use or not."""

    requests_finished: Counter[str] = field(default_factory=Counter)
    """By finish reason: stop, length, abort, error."""
    prompt_tokens: int = 0
    """Prompt tokens of requests that were started (once per request, not again after a preemption)."""
    prefix_cache_queries: int = 0
    """Tokens of admitted requests (again after a preemption)."""
    prefix_cache_hits: int = 0
    """Tokens among them that were in the KV cache already."""
    generation_tokens: int = 0
    overlapped_steps: int = 0
    """Steps that were still running when the next one was enqueued, or could have been."""
    preemptions: int = 0
    dispatch: Counter[tuple[str, int, str]] = field(default_factory=Counter)
    """Steps by (mode, captured size, reason); the size is ``NO_SIZE`` in mode NONE."""
    batches: Counter[int] = field(default_factory=Counter)
    """Steps by ``batch_bucket`` of their real tokens, before padding."""
    scheduled_tokens: Counter[str] = field(default_factory=Counter)
    """Real tokens of all steps, by mode."""
    padding_tokens: Counter[str] = field(default_factory=Counter)
    """Rows added to reach the padded size, by mode."""
    step_seconds: dict[str, Histogram] = field(default_factory=dict)
    """Wall time of steps, by mode."""
    queue_seconds: Histogram = field(default_factory=lambda: Histogram(QUEUE_BUCKETS_SECONDS))
    """From a request's arrival at the engine to the first step that runs it."""

    def record_step(
        self, *, mode: str, size: int, reason: str, real_tokens: int, seconds: float
    ) -> None:
        """Count one step: ``size`` rows ran, of which ``real_tokens`` were wanted."""
        self.dispatch[mode, NO_SIZE if mode == "NONE" else size, reason] += 1
        self.batches[batch_bucket(real_tokens)] += 1
        self.scheduled_tokens[mode] += real_tokens
        self.padding_tokens[mode] += size - real_tokens
        self.step_seconds.setdefault(mode, Histogram(STEP_BUCKETS_SECONDS)).observe(seconds)

    def record_queue(self, seconds: float) -> None:
        """Count one request that was scheduled for the first time."""
        self.queue_seconds.observe(seconds)

    def to_values(
        self,
        *,
        counters: dict[str, int],
        graph_hits: list[tuple[str, int, bool, int]] | None = None,
    ) -> dict[str, Any]:
        """The message body: plain lists, numbers and strings.

        Args:
            counters: ``compilation_counter.snapshot()`` of the engine process.
            graph_hits: replays of every recorded graph: (mode, num_tokens, uniform_decode, hits).
        """
        return {
            "requests_running": self.requests_running,
            "requests_waiting": self.requests_waiting,
            "kv_blocks_used": self.kv_blocks_used,
            "kv_blocks_total": self.kv_blocks_total,
            "kv_blocks_cached": self.kv_blocks_cached,
            "requests_finished": dict(self.requests_finished),
            "prompt_tokens": self.prompt_tokens,
            "prefix_cache_queries": self.prefix_cache_queries,
            "prefix_cache_hits": self.prefix_cache_hits,
            "generation_tokens": self.generation_tokens,
            "overlapped_steps": self.overlapped_steps,
            "preemptions": self.preemptions,
            "dispatch": [[*key, count] for key, count in sorted(self.dispatch.items())],
            "batches": [[tokens, count] for tokens, count in sorted(self.batches.items())],
            "scheduled_tokens": dict(self.scheduled_tokens),
            "padding_tokens": dict(self.padding_tokens),
            "step_seconds": {
                mode: {"counts": list(histogram.counts), "sum": histogram.sum}
                for mode, histogram in self.step_seconds.items()
            },
            "queue_seconds": {
                "counts": list(self.queue_seconds.counts),
                "sum": self.queue_seconds.sum,
            },
            "counters": dict(counters),
            "graph_hits": [list(row) for row in graph_hits or ()],
        }
