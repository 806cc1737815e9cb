"""Real traffic from a file: how often batches of each size ran.  No torch.

Four kinds of file are understood, told apart by their content: a JSON object of sizes and counts, lines
of ``size,count``, the text of ``GET /metrics`` and the answer of a Prometheus query.  The last two are
read for ``kerf_batches_total``, the only series with sizes before padding: a plan made from captured
sizes would find that they fit themselves.
"""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kerf_runtime.config.compilation import MAX_SIZE, CUDAGraphMode
from kerf_runtime.cudagraph.size_plan import Histogram
from kerf_runtime.errors import ConfigError

__all__ = ["Traffic", "parse_traffic", "read_traffic"]

SERIES = "kerf_batches_total"
_HINT = (
    f'Pass {{"size": count}} as JSON, lines of size,count, the text of /metrics, or the answer of '
    f"Prometheus to a query such as sum by (tokens) (increase({SERIES}[7d]))"
)


@dataclass(frozen=True)
class Traffic:
    """What a file says.

    Attributes:
        histogram: tokens of a batch before padding -> steps.
        captured: sizes that have a graph now; empty if the file does not tell.
        graphs: graphs that exist now, by mode; empty if the file does not tell.
        graph_bytes: bytes that they hold, by mode; likewise.
        shared_bytes: bytes that are spent once, however many graphs there are.
        mode: CUDA-graph mode in force; None if the file does not tell or there are no graphs.
    """

    histogram: Histogram
    captured: tuple[int, ...] = ()
    graphs: Mapping[CUDAGraphMode, int] = field(default_factory=dict)
    graph_bytes: Mapping[CUDAGraphMode, int] = field(default_factory=dict)
    shared_bytes: int = 0
    mode: CUDAGraphMode | None = None

    def bytes_per_graph(self, mode: CUDAGraphMode) -> int | None:
        """What a graph of ``mode`` takes, or any graph if there is none of that mode; None if unknown."""
        modes = [mode] if self.graphs.get(mode) else list(self.graphs)
        graphs = sum(self.graphs[found] for found in modes)
        size = sum(self.graph_bytes.get(found, 0) for found in modes)
        return -(-size // graphs) if size and graphs else None


def read_traffic(path: Path) -> Traffic:
    """The traffic in the file at ``path``, or on standard input if it is ``-``.

    Raises:
        ConfigError: the file cannot be read or is of no known kind; names the entry.
    """
    if str(path) == "-":
        return parse_traffic(sys.stdin.read(), where="standard input")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read the histogram: {error.strerror}", where=str(path)) from None
    except UnicodeDecodeError:
        raise ConfigError("the histogram is not text", where=str(path), hint=_HINT) from None
    return parse_traffic(text, where=str(path))


def parse_traffic(text: str, *, where: str) -> Traffic:
    """The traffic in ``text``.

    Raises:
        ConfigError: it is of no known kind or has no steps; ``where`` says which text.
    """
    start = text.lstrip()
    if start.startswith("{"):
        traffic = Traffic(_from_json(start, where))
    elif start.startswith("#") or start.startswith("kerf_"):
        traffic = _from_metrics(text, where)
    else:
        traffic = Traffic(_from_lines(text, where))
    if not any(traffic.histogram.values()):
        raise ConfigError("the histogram has no steps", where=where, hint=_HINT)
    return traffic


@dataclass
class _Steps:
    """Collects counts and names the entry that is wrong."""

    where: str
    counts: dict[int, float] = field(default_factory=dict)

    def add(self, entry: str, size: object, count: object) -> None:
        """Count ``count`` steps of ``size`` tokens; both may be text."""
        tokens = self._size(entry, size)
        self.counts[tokens] = self.counts.get(tokens, 0) + self._count(entry, count)

    def _size(self, entry: str, value: object) -> int:
        try:
            size = int(str(value))
        except ValueError:
            size = 0
        if not 1 <= size <= MAX_SIZE:
            raise ConfigError(
                f"{entry}: a size is a number of tokens from 1 to {MAX_SIZE}, not {value!r}",
                where=self.where,
            )
        return size

    def _count(self, entry: str, value: object) -> float:
        try:
            count = math.nan if isinstance(value, bool) else float(str(value))
        except ValueError:
            count = math.nan
        if not 0 <= count < math.inf:
            raise ConfigError(
                f"{entry}: a count is a number of steps, not {value!r}", where=self.where
            )
        return int(count) if count.is_integer() else count


def _from_lines(text: str, where: str) -> Histogram:
    steps = _Steps(where)
    for number, row in enumerate(csv.reader(text.splitlines()), start=1):
        cells = [cell.strip() for cell in row]
        if not any(cells) or (number == 1 and cells == ["size", "count"]):
            continue
        if len(cells) != 2:
            raise ConfigError(f"line {number}: expected size,count", where=where, hint=_HINT)
        steps.add(f"line {number}", *cells)
    return steps.counts


def _from_json(text: str, where: str) -> Histogram:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not valid JSON: {error}", where=where, hint=_HINT) from None
    if "status" in data or "resultType" in data:
        return _from_query(data, where)
    steps = _Steps(where)
    for size, count in data.items():
        steps.add(f"entry {size!r}", size, count)
    return steps.counts


def _from_metrics(text: str, where: str) -> Traffic:
    steps, captured = _Steps(where), set()
    values: dict[str, float] = {}
    graphs: dict[CUDAGraphMode, int] = {}
    graph_bytes: dict[CUDAGraphMode, int] = {}
    mode: CUDAGraphMode | None = None
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                values[sample.name] = values.get(sample.name, 0) + sample.value
                if sample.name == SERIES:
                    steps.add(f"{SERIES}{sample.labels}", sample.labels.get("tokens"), sample.value)
                elif sample.name == "kerf_cudagraph_memory_bytes":
                    captured.add(int(sample.labels["size"]))
                    _add(graph_bytes, sample)
                elif sample.name == "kerf_cudagraph_graphs":
                    _add(graphs, sample)
                elif sample.name == "kerf_effective_config_info":
                    mode = CUDAGraphMode(sample.labels["effective_mode"])
    except (ValueError, KeyError) as error:
        raise ConfigError(f"not the metrics of a runtime: {error}", where=where) from None
    if SERIES not in values:
        raise ConfigError(
            f"the metrics have no {SERIES}",
            where=where,
            hint="Scrape a serving pod after it has answered requests",
        )
    return Traffic(
        steps.counts,
        tuple(sorted(captured)),
        graphs,
        graph_bytes,
        int(values.get("kerf_cudagraph_shared_bytes", 0)),
        None if mode is CUDAGraphMode.NONE else mode,
    )


def _add(totals: dict[CUDAGraphMode, int], sample: Sample) -> None:
    mode = CUDAGraphMode(sample.labels["mode"])
    totals[mode] = totals.get(mode, 0) + int(sample.value)


def _from_query(answer: Mapping[str, Any], where: str) -> Histogram:
    """Steps by the label ``tokens`` of a query's answer; other labels (pods) are added up.

    An instant vector is taken as it is.  Of a range, the plain counter is taken as its increase, with
    resets; anything that was computed (it has no name any more) as the sum of its values.
    """
    if answer.get("status", "success") != "success":
        raise ConfigError(
            f"the query failed: {answer.get('error', 'no reason given')}", where=where
        )
    steps = _Steps(where)
    try:
        data = answer.get("data", answer)
        kind, result = data["resultType"], data["result"]
        if kind not in ("vector", "matrix"):
            raise ConfigError(
                f"the query's result is a {kind}, not a vector or a matrix", where=where
            )
        began = min((s["values"][0][0] for s in result), default=0) if kind == "matrix" else 0
        for number, series in enumerate(result, start=1):
            labels = series["metric"]
            _check_labels(labels, where)
            if kind == "vector":
                count: object = series["value"][1]
            elif labels.get("__name__") == SERIES:
                count = _increase(series["values"], began)
            else:
                count = sum(float(value) for _, value in series["values"])
            steps.add(f"series {number}", labels["tokens"], count)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ConfigError(
            f"not the answer of a query: {type(error).__name__} {error}", where=where, hint=_HINT
        ) from None
    return steps.counts


def _check_labels(labels: Mapping[str, str], where: str) -> None:
    if "tokens" in labels:
        return
    what = "a series has no label tokens"
    if "size" in labels:
        what += ", only size, which is the captured size with its padding"
    raise ConfigError(what, where=where, hint=f"Query {SERIES} and keep the label tokens")


def _increase(values: Iterable[tuple[float, str]], began: float) -> float:
    """How far a counter went up; it starts at 0 if its first sample is not from where the range began."""
    points = [(float(at), float(value)) for at, value in values]
    total = 0.0 if points[0][0] == began else points[0][1]
    for (_, before), (_, now) in pairwise(points):
        total += now - before if now >= before else now
    return total
