"""What a server has counted, read from its ``/metrics`` for ``benchmarks.soak`` and ``benchmarks.hostile``."""

from __future__ import annotations

import re
import time
from collections import Counter
from typing import Any

import httpx

__all__ = ["difference", "scrape", "settled"]

_SETTLE_SECONDS = 30.0


def scrape(url: str) -> dict[str, Any]:
    """The server's counters, as ``compare`` needs them."""
    text = httpx.get(f"{url}/metrics", timeout=60).raise_for_status().text
    counted: dict[str, Any] = {
        "http": Counter(),
        "ended": Counter(),
        "real": Counter(),
        "padding": Counter(),
        "dispatch": [],
        "steps": 0.0,
        "late": 0.0,
        "alive": 0.0,
        "used": 0.0,
    }
    for line in text.splitlines():
        match = re.fullmatch(r"(kerf_\w+?)(?:\{(.*)\})? ([0-9.eE+-]+)", line)
        if match is None:
            continue
        name, labels, value = (
            match[1],
            dict(re.findall(r'(\w+)="([^"]*)"', match[2] or "")),
            match[3],
        )
        number = float(value)
        if name == "kerf_http_requests_total":
            counted["http"][int(labels["status"])] += number
        elif name == "kerf_requests_finished_total":
            counted["ended"][labels["reason"]] += number
        elif name == "kerf_scheduled_tokens_total":
            counted["real"][labels["mode"]] += number
        elif name == "kerf_padding_tokens_total":
            counted["padding"][labels["mode"]] += number
        elif name == "kerf_dispatch_total":
            counted["dispatch"].append((labels["mode"], int(labels["size"]), number))
        elif name == "kerf_step_duration_seconds_count":
            counted["steps"] += number
        elif name in ("kerf_compilations_after_startup_total", "kerf_capture_after_startup_total"):
            counted["late"] += number
        elif name in ("kerf_requests_running", "kerf_requests_waiting"):
            counted["alive"] += number
        elif name == "kerf_kv_cache_usage_ratio":
            counted["used"] = number
    return counted


def settled(url: str) -> dict[str, Any]:
    """The counters once nothing runs any more: the engine tells its numbers a few times a second."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    while True:
        counted = scrape(url)
        time.sleep(0.6)
        again = scrape(url)
        if (counted == again and not again["alive"]) or time.monotonic() > deadline:
            return again


def difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What was counted between; what is a state and no count stays as it is in the end."""
    result = dict(after)
    for name in ("http", "ended", "real", "padding"):
        result[name] = Counter({k: n - before[name][k] for k, n in after[name].items()})
    for name in ("steps", "late"):
        result[name] = after[name] - before[name]
    earlier: Counter[tuple[str, int]] = Counter()
    for mode, size, n in before["dispatch"]:
        earlier[mode, size] += n
    later: Counter[tuple[str, int]] = Counter()
    for mode, size, n in after["dispatch"]:
        later[mode, size] += n
    result["dispatch"] = [(*key, n - earlier[key]) for key, n in later.items()]
    return result
