"""Writes benchmarks/README.md from the records in benchmarks/results: numbers are never typed.

``python -m benchmarks.readme`` writes the file, ``--check`` fails if it is out of date.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kerf_runtime.cli.bench_record import spread_text
from kerf_runtime.cli.bench_startup import phase_rows

RESULTS = Path(__file__).resolve().parent / "results"
TARGET = Path(__file__).resolve().parent / "README.md"

_INTRODUCTION = """# Benchmarks

<!-- Written by benchmarks/readme.py from benchmarks/results; do not edit. -->

`make bench` runs the programs (`kerf bench latency`, `startup`, `throughput`) with the demo's model and records
machine, versions, command, median and spread in `results/*.json`. Every cell is `median (min to max)`.
Configurations of one record ran side by side in the same minutes, so their *ratios* mean something on a shared
machine; the absolute times belong to that machine. Benchmarks are never tests. What was tried and did not help
is in [NOTES.md](NOTES.md).
"""


def render(results: Path = RESULTS) -> str:
    """The whole document."""
    parts = [_INTRODUCTION]
    for path in sorted(results.glob("*.json")):
        record = json.loads(path.read_text())
        parts.append("\n".join(_section(path, record)))
    return "\n".join(parts)


def write_readme() -> None:
    """Bring README.md up to date."""
    TARGET.write_text(render())


def main() -> int:
    """Write, or with ``--check`` compare."""
    if "--check" in sys.argv[1:]:
        if TARGET.read_text() != render():
            print(
                "benchmarks/README.md is out of date: run python -m benchmarks.readme",
                file=sys.stderr,
            )
            return 1
        return 0
    write_readme()
    return 0


def _section(path: Path, record: dict[str, Any]) -> Iterator[str]:
    machine, versions = record["machine"], record["versions"]
    yield f"## {record['program']}: {record['model']}"
    yield ""
    yield (
        f"{record['date'][:10]}, {machine['cpu']}, {machine['cores']} cores, {machine['memoryGiB']} GiB, "
        f"{', '.join(f'{name} {version}' for name, version in versions.items())}. "
        f"Record: [{path.name}](results/{path.name}). Command: `{' '.join(record['command'])}`"
    )
    yield ""
    yield from _TABLES[record["program"]](record)
    yield ""


def _latency(record: dict[str, Any]) -> Iterator[str]:
    workload = record["workload"]
    yield (
        f"Prompts of {workload['prompt_tokens']} tokens, answers of {workload['output_tokens']}, greedy, "
        f"{workload['repeats']} runs. Speed-up is against level 0, run by run: the median of the ratios of runs that "
        "followed each other within seconds."
    )
    yield ""
    yield (
        "| configuration | batch | prefill ms | speed-up | decode step ms | speed-up | same tokens as level 0 |"
    )
    yield "|---|---|---|---|---|---|---|"
    for row in record["results"]:
        cells = [row["configuration"], str(row["batch"])]
        for field in ("prefill", "decodeStep"):
            cells += [spread_text(row[f"{field}Seconds"], 1e3), spread_text(row[f"{field}Speedup"])]
        cells.append("yes" if row["sameTokensAsBaseline"] else "no")
        yield f"| {' | '.join(cells)} |"


def _startup(record: dict[str, Any]) -> Iterator[str]:
    cold, warm = record["results"]
    yield f"{cold['ready']['runs']} starts each, alternating; seconds."
    yield ""
    yield "| phase | cold (empty cache) | warm (filled cache) |"
    yield "|---|---|---|"
    for label, *cells in phase_rows((cold, warm)):
        shown = f"**{label}**" if label.startswith("process") else label
        yield f"| {shown} | {' | '.join(cells)} |"


def _throughput(record: dict[str, Any]) -> Iterator[str]:
    work, found = record["workload"], record["results"]
    rate = (
        "as fast as they are answered" if work["rate"] is None else f"{work['rate']:g} per second"
    )
    yield (
        f"{found['completed']} requests answered, {found['failed']} failed, at most {work['concurrency']} at a time, "
        f"arriving {rate}; prompts of {work['input_len']} tokens, answers of {work['output_len']}, over HTTP, streamed."
    )
    yield ""
    yield (
        f"{found['requestsPerSecond']:.2f} requests/s, {found['outputTokensPerSecond']:.0f} output tokens/s, "
        f"{found['totalTokensPerSecond']:.0f} tokens/s in and out."
    )
    yield ""
    columns = list(found["latencySeconds"])
    yield f"| latency, ms | {' | '.join(columns)} |"
    yield f"|---|{'---|' * len(columns)}"
    for label, field in (
        ("time to first token", "ttftSeconds"),
        ("time per output token", "tpotSeconds"),
        ("whole answer", "latencySeconds"),
    ):
        if found[field] is not None:
            yield f"| {label} | {' | '.join(f'{found[field][c] * 1e3:.2f}' for c in columns)} |"


def _bench_capture(record: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{record['backend']} graphs, {record['captureSeconds']['runs']} starts; all together "
        f"{spread_text(record['captureSeconds'], 1e3)} ms and {record['bytes']} bytes."
    )
    yield ""
    yield "| mode | tokens | nodes | bytes | capture ms |"
    yield "|---|---|---|---|---|"
    for row in record["results"]:
        cells = [row["mode"], row["tokens"], row["nodes"], row["bytes"]]
        yield f"| {' | '.join(map(str, cells))} | {spread_text(row['seconds'], 1e3)} |"


def _passes(record: dict[str, Any]) -> Iterator[str]:
    runs = record["results"][0]["gain"]["runs"]
    yield (
        f"Microseconds per call in a replayed CUDA graph on one {record['machine']['gpu']}, {runs} runs in turn. "
        "*Unfused* is what a fusion pass finds, *fused* what it puts there, *inductor* what Inductor alone makes of "
        "the native form."
    )
    yield ""
    yield "| what is fused with the FP8 quantisation | rows | unfused | fused | gain | inductor |"
    yield "|---|---|---|---|---|---|"
    for row in record["results"]:
        cells = [
            spread_text(row["seconds"][name], 1e6) if name in row["seconds"] else "-"
            for name in ("unfused", "fused", "inductor")
        ]
        cells.insert(2, spread_text(row["gain"]))
        yield f"| {row['case']} | {row['rows']} | {' | '.join(cells)} |"


def _attention(record: dict[str, Any]) -> Iterator[str]:
    limit = record["readLimit"] / 1e12
    yield (
        f"On {record['machine']['gpu']}. Decode reads every key and value once; the card reads {limit:.2f} TB/s. "
        "Above 100 % the kernel read faster than the plain read that gave the limit."
    )
    yield ""
    yield "| decode: batch | cached tokens each | us | TB/s | of the limit |"
    yield "|---|---|---|---|---|"
    for row in record["decode"]:
        yield (
            f"| {row['batch']} | {row['length']} | {spread_text(row['seconds'], 1e6, 1)} | "
            f"{row['bytesPerSecond'] / 1e12:.2f} | {row['ofReadLimit']:.0%} |"
        )
    yield ""
    yield "| prefill: tokens | us | TFLOP/s | PyTorch flash attention, us | TFLOP/s | ratio of rates |"
    yield "|---|---|---|---|---|---|"
    for row in record["prefill"]:
        yield (
            f"| {row['length']} | {spread_text(row['seconds'], 1e6, 1)} | {row['flopsPerSecond'] / 1e12:.0f} | "
            f"{spread_text(row['flashSeconds'], 1e6, 1)} | {row['flashFlopsPerSecond'] / 1e12:.0f} | "
            f"{row['ofFlash']:.2f} |"
        )


def _own(record: dict[str, Any]) -> Iterator[str]:
    """By the program itself, which imports what it measures: only where its record is there."""
    yield from importlib.import_module(record["program"]).table(record)


_TABLES: dict[str, Callable[[dict[str, Any]], Iterator[str]]] = {
    "kerf bench latency": _latency,
    "kerf bench capture": _bench_capture,
    "kerf bench startup": _startup,
    "kerf bench throughput": _throughput,
    "benchmarks.attention": _attention,
    "benchmarks.capture": _own,
    "benchmarks.compile": _own,
    "benchmarks.decode": _own,
    "benchmarks.hostile": _own,
    "benchmarks.overhead": _own,
    "benchmarks.passes": _passes,
    "benchmarks.serving": _own,
    "benchmarks.soak": _own,
    "benchmarks.traffic": _own,
    "benchmarks.weights": _own,
}


if __name__ == "__main__":
    sys.exit(main())
