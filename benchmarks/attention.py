"""Speed of the attention kernels on a GPU: ``python -m benchmarks.attention [--tune] [--output FILE]``.

Decode: bytes of keys and values over time, beside what the card can read.  Every measurement is one
recorded graph over as many layers' caches as exceed the level-2 cache, as a model would run them.
Prefill: floating-point operations over time, beside PyTorch's own flash attention in the same run.
``--tune`` times variants of tiles and splits instead; kernels are compiled in parallel processes first.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kerf_runtime.cli.bench_record import header, spread
from kerf_runtime.forward_context import AttentionMetadata
from kerf_runtime.ops import attention_triton
from kerf_runtime.ops.attention_triton import Tiles, paged_attention

HEADS, KV_HEADS, SIZE, BLOCK = 32, 8, 128, 16
READ_LIMIT = 4.4e12
"""Bytes per second that an H200 reads."""
RUNS = 7
DECODE = list(itertools.product((1, 8, 64, 256), (128, 2048, 32768)))
PREFILL = (2048, 4096, 8192)
WORKERS = 14


@dataclass
class Batch:
    """Inputs of one attention call, with caches of several layers to rotate over."""

    q: Tensor
    k: Tensor
    v: Tensor
    caches: list[tuple[Tensor, Tensor]]
    metadata: AttentionMetadata

    def run(self, layer: int) -> Tensor:
        output = torch.empty_like(self.q)
        paged_attention(self.q, self.k, self.v, output, *self.caches[layer], self.metadata)
        return output

    def run_all(self) -> None:
        for layer in range(len(self.caches)):
            self.run(layer)


def make_batch(sequences: int, length: int, new: int, *, caches_bytes: int) -> Batch:
    """``sequences`` of ``length`` tokens, the last ``new`` of them in this step, on shuffled blocks."""
    per_sequence = -(-length // BLOCK)
    blocks = sequences * per_sequence
    bytes_each = blocks * BLOCK * KV_HEADS * SIZE * 2 * 2
    layers = max(1, min(32, -(-caches_bytes // bytes_each)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    table = torch.randperm(blocks, device="cuda", dtype=torch.int32).view(sequences, per_sequence)
    positions = torch.arange(length - new, length, device="cuda")
    slots = table[:, positions // BLOCK].long() * BLOCK + positions % BLOCK
    metadata = AttentionMetadata(
        query_start=torch.arange(sequences + 1, dtype=torch.int32, device="cuda") * new,
        seq_lens=torch.full((sequences,), length, dtype=torch.int32, device="cuda"),
        block_table=table,
        slot_mapping=slots.flatten(),
        uniform_decode=new == 1,
        max_query_len=new,
    )
    tokens, cache = sequences * new, (blocks, BLOCK, KV_HEADS, SIZE)
    return Batch(
        normal(tokens, HEADS, SIZE),
        normal(tokens, KV_HEADS, SIZE),
        normal(tokens, KV_HEADS, SIZE),
        [(normal(*cache), normal(*cache)) for _ in range(layers)],
        metadata,
    )


def seconds(work: Callable[[], None], calls: int, *, least: float = 0.02) -> list[float]:
    """Seconds per call of a recorded graph of ``work``, which makes ``calls`` calls; ``RUNS`` of them."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in "se")
    torch.cuda.synchronize()
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    replays = max(1, int(least / (start.elapsed_time(end) / 1e3 + 1e-9)))
    found = []
    for _ in range(RUNS):
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / 1e3 / replays / calls)
    return found


def measure_decode(sequences: int, length: int) -> dict[str, Any]:
    batch = make_batch(sequences, length, 1, caches_bytes=1 << 29)
    layers = len(batch.caches)
    times = seconds(batch.run_all, layers)
    moved = sequences * length * KV_HEADS * SIZE * 2 * 2
    median = statistics.median(times)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(100):
        batch.run(0)
    host = (time.perf_counter() - started) / 100
    torch.cuda.synchronize()
    return {
        "batch": sequences,
        "length": length,
        "seconds": spread(times),
        "hostSeconds": host,
        "bytesPerSecond": moved / median,
        "ofReadLimit": moved / median / READ_LIMIT,
    }


def measure_prefill(length: int) -> dict[str, Any]:
    batch = make_batch(1, length, length, caches_bytes=1)
    ours = seconds(batch.run_all, 1)
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (batch.q, batch.k, batch.v))
    repeated = [t.repeat_interleave(HEADS // KV_HEADS, 1).contiguous() for t in (k, v)]
    q = q.contiguous()

    def theirs() -> None:
        F.scaled_dot_product_attention(q, repeated[0], repeated[1], is_causal=True)

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        flash = seconds(theirs, 1)
    operations = 4 * HEADS * SIZE * length * (length + 1) / 2
    rates = [operations / statistics.median(times) for times in (ours, flash)]
    return {
        "length": length,
        "seconds": spread(ours),
        "flashSeconds": spread(flash),
        "flopsPerSecond": rates[0],
        "flashFlopsPerSecond": rates[1],
        "ofFlash": rates[0] / rates[1],
    }


def record() -> dict[str, Any]:
    """The whole benchmark."""
    result = header("benchmarks.attention")
    properties = torch.cuda.get_device_properties(0)
    result["machine"]["gpu"] = properties.name
    result["command"] = ["python", "-m", "benchmarks.attention"]
    result["model"] = f"{HEADS}/{KV_HEADS} heads of {SIZE}, bfloat16, blocks of {BLOCK}"
    result["readLimit"] = READ_LIMIT
    result["decode"] = [measure_decode(*case) for case in DECODE]
    result["prefill"] = [measure_prefill(length) for length in PREFILL]
    return result


def table(result: dict[str, Any]) -> Iterator[str]:
    """A short text form."""
    for row in result["decode"]:
        yield (
            f"decode  {row['batch']:4d} x {row['length']:5d}  {row['seconds']['median'] * 1e6:9.1f} us  "
            f"{row['bytesPerSecond'] / 1e12:5.2f} TB/s  {row['ofReadLimit']:5.1%}"
            f"  launch {row['hostSeconds'] * 1e6:.0f} us"
        )
    for row in result["prefill"]:
        yield (
            f"prefill {row['length']:5d}  {row['seconds']['median'] * 1e6:9.1f} us  "
            f"{row['flopsPerSecond'] / 1e12:5.0f} TFLOP/s, flash {row['flashFlopsPerSecond'] / 1e12:5.0f}"
            f"  {row['ofFlash']:5.1%}"
        )


DECODE_VARIANTS = [
    Tiles(16, *rest) for rest in ((64, 3, 4), (64, 5, 4), (64, 5, 2), (64, 7, 4), (128, 3, 4))
]
PREFILL_VARIANTS = [
    Tiles(*numbers)
    for numbers in (
        *itertools.product((64, 128), (64,), (3, 5), (4,)),
        *itertools.product((256,), (32, 64), (3, 5, 7), (8,)),
        (256, 128, 3, 8),
        (128, 32, 3, 4),
    )
]


def use(kind: str, tiles: Tiles) -> None:
    """Make the host side choose ``tiles``."""
    name = "decode_tiles" if kind == "decode" else "mixed_tiles"
    setattr(attention_triton, name, lambda *_args, **_kwargs: tiles)
    attention_triton._ready.clear()


def variants() -> list[tuple[str, Tiles]]:
    decode = [("decode", tiles) for tiles in DECODE_VARIANTS]
    return decode + [("prefill", tiles) for tiles in PREFILL_VARIANTS]


def compile_share(index: int) -> None:
    """Compile every ``WORKERS``-th variant by running it once on little data."""
    small = {
        "decode": make_batch(2, 256, 1, caches_bytes=1),
        "prefill": make_batch(1, 256, 256, caches_bytes=1),
    }
    for kind, tiles in variants()[index::WORKERS]:
        use(kind, tiles)
        try:
            small[kind].run(0)
        except Exception as error:  # noqa: BLE001  a variant that does not fit is no candidate
            print(f"{kind} {tiles}: {str(error).splitlines()[0][:90]}", flush=True)


def tune() -> None:
    """Print the best variants for typical batches."""
    started = time.monotonic()
    workers = [
        subprocess.Popen([sys.executable, "-m", "benchmarks.attention", "--compile", str(i)])
        for i in range(WORKERS)
    ]
    for worker in workers:
        worker.wait()
    print(f"compiled in {time.monotonic() - started:.1f} s", flush=True)
    cases: list[tuple[str, int, int]] = [
        *(("decode", b, n) for b, n in ((1, 32768), (8, 2048), (64, 128), (4, 8192))),
        *(("prefill", 1, n) for n in (512, 2048, 4096, 8192)),
    ]
    choose = attention_triton.choose_splits
    for kind, sequences, length in cases:
        new = 1 if kind == "decode" else length
        batch = make_batch(sequences, length, new, caches_bytes=1 << 29 if kind == "decode" else 1)
        layers = len(batch.caches)
        found = []
        default = choose(sequences, KV_HEADS, 132)
        splits_options = (
            sorted({default, max(1, default // 2), min(32, default * 2), min(32, default * 4)})
            if kind == "decode"
            else [1]
        )
        for (of, tiles), splits in itertools.product(variants(), splits_options):
            if of != kind:
                continue
            use(kind, tiles)
            attention_triton.choose_splits = lambda *_args, splits=splits: splits
            try:
                batch.run(0)
                torch.cuda.synchronize()
                times = quick(batch)
            except Exception:  # noqa: BLE001  reported when it was compiled
                continue
            found.append((times / layers, tiles, splits))
        found.sort(key=lambda item: item[0])
        for best, tiles, splits in found[:5]:
            rate = (
                f"{sequences * length * KV_HEADS * SIZE * 4 / best / 1e12:.2f} TB/s"
                if kind == "decode"
                else f"{2 * HEADS * SIZE * length * length / best / 1e12:.0f} TFLOP/s"
            )
            print(
                f"{kind} {sequences} x {length}: {best * 1e6:.1f} us {rate} {tiles} splits {splits}",
                flush=True,
            )
    attention_triton.choose_splits = choose


def quick(batch: Batch) -> float:
    """One rough time of a graph over all layers, in seconds: the best of three."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch.run_all()
    graph.replay()
    best = float("inf")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in "se")
    for _ in range(3):
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true", help="time variants instead")
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help="write the record there")
    options = parser.parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        if options.compile is not None:
            compile_share(options.compile)
        elif options.tune:
            tune()
        else:
            result = record()
            print("\n".join(table(result)))
            if options.output:
                options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
