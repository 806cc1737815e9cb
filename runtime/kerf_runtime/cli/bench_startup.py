"""Start-up of the real server, from an empty and from a filled compile cache, phase by phase.

Every run is a fresh ``kerf serve`` process that is asked for one token and then stopped; a cold run has
an empty cache folder, a warm run the one that the cold run before it filled.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from kerf_runtime.cli.bench_record import header, spread, spread_text
from kerf_runtime.cli.bench_server import started_server, write_document
from kerf_runtime.cli.output import echo_table
from kerf_runtime.config import ModelDeploymentDocument

__all__ = ["measure", "measured_start", "phase_rows", "print_table", "summary"]


def measure(document: ModelDeploymentDocument, model_path: Path, *, repeats: int) -> dict[str, Any]:
    """Start the server ``repeats`` times cold and warm and return the record.

    Raises:
        EngineError: a server did not become ready.
    """
    runs: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory(prefix="kerf-bench-") as folder:
        file = write_document(document, Path(folder))
        for repeat in range(repeats):
            cache = Path(folder) / f"cache-{repeat}"
            for kind in runs:
                with measured_start(file, model_path, cache, document.served_name) as (_, start):
                    runs[kind].append(start)
    return {
        **header("kerf bench startup"),
        "model": document.name,
        "results": [summary(kind, starts) for kind, starts in runs.items()],
    }


@contextmanager
def measured_start(
    file: Path, model_path: Path, cache: Path, model: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """A server that has given its first token: its address and what the start took.

    Seconds per phase, to ready and to the first token, and the compile counters.

    Raises:
        EngineError: the server did not become ready.
    """
    started = time.monotonic()
    with started_server(file, model_path, cache) as url:
        ready = time.monotonic() - started
        body = {"model": model, "prompt": [1, 2, 3, 4], "max_tokens": 1, "temperature": 0}
        with httpx.Client(base_url=url, timeout=120) as http:
            http.post("/v1/completions", json=body).raise_for_status()
            first_token = time.monotonic() - started
            report = http.get("/debug/graphs").json()
        yield (
            url,
            {
                "ready": ready,
                "firstToken": first_token,
                "phases": report["startup"],
                "cache": report["cache"]["result"],
                "counters": report["counters"],
            },
        )


def phase_rows(results: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """A label and a cell of each of ``results``, which ``summary`` made: phases, sums, counters."""
    phases = dict.fromkeys(name for part in results for name in part["phases"])
    phases.pop("ready", None)
    for name in phases:
        cells = [part["phases"].get(name) for part in results]
        yield (name, *("-" if cell is None else spread_text(cell) for cell in cells))
    for label, field in (("process to ready", "ready"), ("process to first token", "firstToken")):
        yield (label, *(spread_text(part[field]) for part in results))
    for label, counter in (("traces", "dynamo_traces"), ("compilations", "inductor_compilations")):
        yield (label, *(str(part["counters"][counter]) for part in results))


def print_table(result: dict[str, Any]) -> None:
    """Seconds per phase, cold beside warm."""
    cold, warm = result["results"]
    rows = [*phase_rows((cold, warm)), ("cache", cold["cache"], warm["cache"])]
    echo_table(("PHASE s", "COLD", "WARM"), rows, right=(1, 2))


def summary(kind: str, starts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Spreads over starts of one kind."""
    names = dict.fromkeys(name for start in starts for name in start["phases"])
    return {
        "configuration": kind,
        "ready": spread([start["ready"] for start in starts]),
        "firstToken": spread([start["firstToken"] for start in starts]),
        "phases": {
            name: spread([s["phases"][name] for s in starts if name in s["phases"]])
            for name in names
        },
        "cache": starts[-1]["cache"],
        "counters": starts[-1]["counters"],
    }
