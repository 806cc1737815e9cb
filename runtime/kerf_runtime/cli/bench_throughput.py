"""Rates and latencies of a server under load, as its clients see them: over HTTP, streamed."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import Any

import click

from kerf_runtime.cli.bench_record import header
from kerf_runtime.cli.load import Load, Outcome, Target, plan, run_load, summarize
from kerf_runtime.cli.output import echo_table, human_seconds
from kerf_runtime.cli.progress import PhaseProgress
from kerf_runtime.errors import KerfError

__all__ = ["BUSY_SHARE", "measure", "print_table"]

_LATENCIES = {
    "time to first token": "ttftSeconds",
    "time per output token": "tpotSeconds",
    "between pieces of text": "itlSeconds",
    "whole answer": "latencySeconds",
}

BUSY_SHARE = 0.8
"""Of one CPU, above which the load generator limits what it measures."""


def measure(target: Target, load: Load, *, warm_up: int, progress: PhaseProgress) -> dict[str, Any]:
    """Warm up, send the load, and return the record.

    Args:
        warm_up: requests before the first that counts.

    Raises:
        KerfError: no request was answered, of those that warm up or of those that count.
    """
    # Planned together, so that a warm-up puts nothing of the load into a prefix cache.
    everything = plan(Load(**{**asdict(load), "requests": warm_up + load.requests}))
    first, counted = everything[:warm_up], everything[warm_up:]
    if warm_up:
        progress("warm-up", f"{warm_up} requests", None)
        outcomes = asyncio.run(run_load(target, first, concurrency=load.concurrency))
        _check(outcomes, "warm-up requests")
        offset = first[-1].at
        counted = [type(r)(r.at - offset, r.prompt, r.output_len) for r in counted]
    report = _Report(progress, load.requests)
    spent = time.process_time()
    outcomes = asyncio.run(
        run_load(target, counted, concurrency=load.concurrency, on_outcome=report)
    )
    spent = time.process_time() - spent
    progress.finish()
    _check(outcomes, "requests")
    found = summarize(outcomes)
    found["clientCpuShare"] = spent / found["seconds"]
    return {
        **header("kerf bench throughput"),
        "model": target.model,
        "server": {
            "baseUrl": target.base_url,
            "endpoint": "chat" if target.chat else "completions",
        },
        "workload": {**asdict(load), "ignore_eos": target.ignore_eos, "warm_up": warm_up},
        "results": found,
    }


def print_table(result: dict[str, Any]) -> None:
    """Rates, then latencies by percentile."""
    found = result["results"]
    for label, text in (
        ("requests", f"{found['completed']} answered, {found['failed']} failed"),
        ("duration", human_seconds(found["seconds"])),
        (
            "tokens",
            f"{found['promptTokens']} in, {found['outputTokens']} out "
            f"(counted by the {found['tokensCountedBy']})",
        ),
        ("requests/s", f"{found['requestsPerSecond']:.2f}"),
        ("output tokens/s", f"{found['outputTokensPerSecond']:.1f}"),
        ("all tokens/s", f"{found['totalTokensPerSecond']:.1f}"),
    ):
        click.echo(f"{label:<16} {text}")
    rows = [
        (label, *(f"{found[field][column] * 1e3:.2f}" for column in found[field]))
        for label, field in _LATENCIES.items()
        if found[field] is not None
    ]
    if rows:
        columns = [name.upper() for name in found["latencySeconds"]]
        echo_table(("LATENCY ms", *columns), rows, right=range(1, 1 + len(columns)))
    if found["clientCpuShare"] > BUSY_SHARE:
        click.echo(
            f"This program itself was busy for {found['clientCpuShare']:.0%} of the time: a faster server would "
            "not have looked faster. Run several at once, with other seeds."
        )
    for reason, count in found["errors"].items():
        click.echo(f"failed           {count} x {reason}")


class _Report:
    """Tells the progress after every answer."""

    def __init__(self, progress: PhaseProgress, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = self._failed = self._tokens = 0
        self._began = time.perf_counter()
        progress("requests", f"0/{total}", 0.0)

    def __call__(self, outcome: Outcome) -> None:
        self._done += 1
        self._failed += outcome.error is not None
        self._tokens += outcome.output_tokens
        seconds = time.perf_counter() - self._began
        text = f"{self._done}/{self._total}, {self._tokens / seconds:.0f} tokens/s"
        if self._failed:
            text += f", {self._failed} failed"
        self._progress("requests", text, self._done / self._total)


def _check(outcomes: list[Outcome], what: str) -> None:
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if len(errors) < len(outcomes):
        return
    hint = "See the server's log"
    if "ignore_eos" in errors[0]:
        hint = "--no-ignore-eos asks only for what OpenAI's API has"
    elif "stream_options" in errors[0]:
        hint = "The server must be able to stream with usage"
    raise KerfError(f"none of {len(errors)} {what} was answered: {errors[0]}", hint=hint)
