"""How fast weights reach the device: ``python -m benchmarks.weights [--model llama-8b] [--folder F] [--output FILE]``.

A checkpoint of a known shape lies in the page cache.  It is loaded one tensor after another by the safetensors
library, and in parts by several threads (``kerf_runtime.models.upload``), in turns.  Beside them stands what the
link to the device takes from pinned memory, and what the threads read without it.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from benchmarks.shapes import CONFIGS

from kerf_runtime.cli.bench_record import header, spread, spread_text
from kerf_runtime.config.engine import DType
from kerf_runtime.models import upload
from kerf_runtime.models.loader import load_model, torch_dtype
from kerf_runtime.models.sources import SafetensorsSource

RUNS = 5
THREADS = (1, 2, 4, 8, 16)
_LINK_BYTES = 2**28
_READ_BYTES = 2**24


def load_seconds(folder: Path, dtype: torch.dtype, device: torch.device) -> float:
    """From the path to a model whose last byte has arrived."""
    _wait(device)
    started = time.perf_counter()
    loaded = load_model(folder, dtype=dtype, device=device)
    _wait(device)
    seconds = time.perf_counter() - started
    del loaded
    gc.collect()
    return seconds


def one_by_one(load: Callable[[], float]) -> float:
    """Every tensor is read by the safetensors library and copied."""
    with patch.object(SafetensorsSource, "stored", lambda *_: None):
        return load()


def with_threads(load: Callable[[], float], threads: int) -> float:
    """In parts, by so many threads."""
    with patch.object(upload.Upload.__init__, "__kwdefaults__", {"threads": threads}):
        return load()


def link_rate(device: torch.device) -> float | None:
    """Bytes per second from pinned memory to the device, the best of some copies; None without a GPU."""
    if device.type != "cuda":
        return None
    source = torch.empty(_LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(_LINK_BYTES, dtype=torch.uint8, device=device)
    best = 0.0
    for _ in range(RUNS + 1):
        _wait(device)
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        _wait(device)
        best = max(best, _LINK_BYTES / (time.perf_counter() - started))
    return best


def read_rate(folder: Path, threads: int) -> float:
    """Bytes per second from the page cache into memory, which is used again and again."""

    def read(part: tuple[Path, int, int]) -> int:
        path, first, last = part
        buffer, count = bytearray(_READ_BYTES), 0
        with path.open("rb", buffering=0) as file:
            file.seek(first)
            while first + count < last and (got := file.readinto(buffer)):
                count += got
        return count

    parts = []
    for path in folder.glob("*.safetensors"):
        size = path.stat().st_size
        step = -(-size // threads // _READ_BYTES) * _READ_BYTES
        parts += [(path, first, min(size, first + step)) for first in range(0, size, step)]
    started = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        total = sum(pool.map(read, parts))
    return total / (time.perf_counter() - started)


def record(model: str, folder: Path) -> dict[str, Any]:
    """Make the checkpoint if there is none, then load it every way, in turns."""
    checkpoint = folder / model
    if not checkpoint.exists():
        made = [sys.executable, "-m", "benchmarks.checkpoint", model, str(checkpoint)]
        subprocess.run(made, check=True, stdout=sys.stderr)
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    size = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    load = partial(load_seconds, checkpoint, torch_dtype(DType(CONFIGS[model]["dtype"])), device)
    ways: dict[str, Callable[[], float]] = {"one tensor after another": partial(one_by_one, load)}
    for threads in THREADS:
        plural = "" if threads == 1 else "s"
        ways[f"parts, {threads} thread{plural}"] = partial(with_threads, load, threads)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for run in range(RUNS + 1):
        for name, way in ways.items():
            rate = size / way()
            print(run, name, f"{rate / 1e9:.2f} GB/s", file=sys.stderr, flush=True)
            if run:  # the first allocates the device's memory
                rates[name].append(rate)
    common = header("benchmarks.weights")
    return {
        **common,
        "machine": {
            **common["machine"],
            "gpu": torch.cuda.get_device_name() if gpu else "no GPU",
        },
        "command": ["python", "-m", "benchmarks.weights", "--model", model],
        "model": f"{model}'s shape, {CONFIGS[model]['dtype']}",
        "bytes": size,
        "linkRate": link_rate(device),
        "readRates": {str(n): read_rate(checkpoint, n) for n in THREADS},
        "rates": {name: spread(values) for name, values in rates.items()},
    }


def table(result: dict[str, Any]) -> Iterator[str]:
    """The record as Markdown."""
    link = result["linkRate"]
    yield (
        f"On {result['machine']['gpu']}: {result['model']}, {result['bytes'] / 1e9:.2f} GB in the page cache."
        + ("" if link is None else f" The link takes {link / 1e9:.1f} GB/s from pinned memory.")
    )
    yield ""
    yield "| loaded | GB/s |"
    yield "|---|---|"
    for name, cell in result["rates"].items():
        yield f"| {name} | {spread_text(cell, 1e-9, 2)} |"
    for threads, rate in result["readRates"].items():
        yield f"| only read, {threads} at once | {rate / 1e9:.2f} |"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Measure, print, and write the record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=CONFIGS, default="llama-8b")
    parser.add_argument("--folder", type=Path, help="where checkpoints are kept; none: a new one")
    parser.add_argument("--output", type=Path, help="write the record there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kerf-bench-") as new:
        result = record(options.model, options.folder or Path(new))
    print("\n".join(table(result)))
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
