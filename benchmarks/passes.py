"""What each fusion pass gains on a GPU: ``python -m benchmarks.passes [--output FILE]``.

Each case is what a pass finds (*unfused*: separate operators) and what it puts in its place (*fused*),
beside what Inductor makes of the native form by itself (*inductor*), at the sizes of Llama-8B.  Every
variant is recorded into a CUDA graph of many calls; the graphs of a case are replayed in turn, so that
the ratios are of runs milliseconds apart.  Inputs stay in the level-2 cache, as they do behind a matrix
product.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from benchmarks.attention import make_batch
from torch import Tensor

import kerf_runtime.ops.attention  # noqa: F401  registers torch.ops.kerf.attention
from kerf_runtime.cli.bench_record import header, spread, spread_text
from kerf_runtime.forward_context import ForwardContext, set_forward_context
from kerf_runtime.ops import activation, norm
from kerf_runtime.ops.fp8 import FP8

HIDDEN, INTERMEDIATE = 4096, 14336
ROWS = (1, 64, 512)
CONTEXT = 1024
"""Tokens that each sequence of a decode batch attends to."""
RUNS, CALLS, LEAST_SECONDS = 7, 32, 0.02
EPS = 1e-5
LAYER = "layer.0"

kerf = torch.ops.kerf
Work = Callable[[], Any]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def norm_cases(rows: int) -> Iterator[tuple[str, int, dict[str, Work]]]:
    """RMSNorm with and without the addition, each with the static and the dynamic quantisation."""
    x, residual, weight = normal(rows, HIDDEN), normal(rows, HIDDEN), normal(HIDDEN)
    scale = torch.tensor([0.02], device="cuda")
    native = {
        "static": compiled(norm.rms_norm_static_fp8_quant_native),
        "dynamic": compiled(norm.rms_norm_dynamic_per_token_fp8_quant_native),
        "add static": compiled(norm.fused_add_rms_norm_static_fp8_quant_native),
        "add dynamic": compiled(norm.fused_add_rms_norm_dynamic_per_token_fp8_quant_native),
    }

    def add_unfused_static() -> Any:
        normed, total = kerf.fused_add_rms_norm(x, residual, weight, EPS)
        return kerf.static_scaled_fp8_quant(normed, scale), total

    def add_unfused_dynamic() -> Any:
        normed, total = kerf.fused_add_rms_norm(x, residual, weight, EPS)
        return *kerf.dynamic_per_token_fp8_quant(normed), total

    yield (
        "norm, static",
        HIDDEN,
        {
            "unfused": lambda: kerf.static_scaled_fp8_quant(kerf.rms_norm(x, weight, EPS), scale),
            "fused": lambda: kerf.rms_norm_static_fp8_quant(x, weight, scale, EPS),
            "inductor": lambda: native["static"](x, weight, scale, EPS),
        },
    )
    yield (
        "norm, dynamic",
        HIDDEN,
        {
            "unfused": lambda: kerf.dynamic_per_token_fp8_quant(kerf.rms_norm(x, weight, EPS)),
            "fused": lambda: kerf.rms_norm_dynamic_per_token_fp8_quant(x, weight, EPS),
            "inductor": lambda: native["dynamic"](x, weight, EPS),
        },
    )
    yield (
        "add and norm, static",
        HIDDEN,
        {
            "unfused": add_unfused_static,
            "fused": lambda: kerf.fused_add_rms_norm_static_fp8_quant(
                x, residual, weight, scale, EPS
            ),
            "inductor": lambda: native["add static"](x, residual, weight, scale, EPS),
        },
    )
    yield (
        "add and norm, dynamic",
        HIDDEN,
        {
            "unfused": add_unfused_dynamic,
            "fused": lambda: kerf.fused_add_rms_norm_dynamic_per_token_fp8_quant(
                x, residual, weight, EPS
            ),
            "inductor": lambda: native["add dynamic"](x, residual, weight, EPS),
        },
    )


def activation_cases(rows: int) -> Iterator[tuple[str, int, dict[str, Work]]]:
    """SiLU-and-mul with the static and the dynamic quantisation."""
    x, scale = normal(rows, 2 * INTERMEDIATE), torch.tensor([0.02], device="cuda")
    static = compiled(activation.silu_and_mul_static_fp8_quant_native)
    dynamic = compiled(activation.silu_and_mul_dynamic_per_token_fp8_quant_native)
    yield (
        "activation, static",
        INTERMEDIATE,
        {
            "unfused": lambda: kerf.static_scaled_fp8_quant(kerf.silu_and_mul(x), scale),
            "fused": lambda: kerf.silu_and_mul_static_fp8_quant(x, scale),
            "inductor": lambda: static(x, scale),
        },
    )
    yield (
        "activation, dynamic",
        INTERMEDIATE,
        {
            "unfused": lambda: kerf.dynamic_per_token_fp8_quant(kerf.silu_and_mul(x)),
            "fused": lambda: kerf.silu_and_mul_dynamic_per_token_fp8_quant(x),
            "inductor": lambda: dynamic(x),
        },
    )


def attention_cases(rows: int) -> Iterator[tuple[str, int, dict[str, Work]]]:
    """A decode batch of ``rows`` sequences; Inductor makes nothing of attention."""
    batch = make_batch(rows, CONTEXT, 1, caches_bytes=1)
    scale = torch.tensor([0.02], device="cuda")
    context = ForwardContext(attention=batch.metadata, kv_caches={LAYER: batch.caches[0]})

    def attend(dtype: torch.dtype, output_scale: Tensor | None) -> Tensor:
        output = torch.empty_like(batch.q, dtype=dtype)
        with set_forward_context(context):
            kerf.attention(batch.q, batch.k, batch.v, output, LAYER, output_scale)
        return output.view(rows, -1)

    yield (
        f"attention over {CONTEXT}, static",
        HIDDEN,
        {
            "unfused": lambda: kerf.static_scaled_fp8_quant(attend(torch.bfloat16, None), scale),
            "fused": lambda: attend(FP8, scale),
        },
    )


_compiled: dict[Callable[..., Any], Callable[..., Any]] = {}


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` through Inductor, for any number of rows; once per function."""
    if function not in _compiled:
        _compiled[function] = torch.compile(function, fullgraph=True, dynamic=None)
    return _compiled[function]


def record_graph(work: Work) -> torch.cuda.CUDAGraph:
    """``CALLS`` calls of ``work`` as one graph."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            work()
    return graph


def replay_seconds(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """Seconds per call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in "se")
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / replays / CALLS


def measure(variants: Mapping[str, Work]) -> dict[str, list[float]]:
    """``RUNS`` times per call of every variant, taken in turn."""
    graphs = {name: record_graph(work) for name, work in variants.items()}
    once = max(replay_seconds(graph, 2) for graph in graphs.values()) * CALLS
    replays = max(1, int(LEAST_SECONDS / once))
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(RUNS):
        for name, graph in graphs.items():
            times[name].append(replay_seconds(graph, replays))
    return times


def record() -> dict[str, Any]:
    """The whole benchmark."""
    result = header("benchmarks.passes")
    result["machine"]["gpu"] = torch.cuda.get_device_properties(0).name
    result["command"] = ["python", "-m", "benchmarks.passes"]
    result["model"] = f"hidden {HIDDEN}, intermediate {INTERMEDIATE}, bfloat16"
    result["results"] = []
    for rows in ROWS:
        for cases in (norm_cases, activation_cases, attention_cases):
            for name, width, variants in cases(rows):
                times = measure(variants)
                ratios = [
                    unfused / fused
                    for unfused, fused in zip(times["unfused"], times["fused"], strict=True)
                ]
                result["results"].append(
                    {
                        "case": name,
                        "rows": rows,
                        "width": width,
                        "seconds": {variant: spread(values) for variant, values in times.items()},
                        "gain": spread(ratios),
                    }
                )
    return result


def table(result: dict[str, Any]) -> Iterator[str]:
    """A short text form; times in microseconds."""
    yield f"{'case':31} {'rows':>4}  {'unfused us':21} {'fused us':21} {'inductor us':21} gain"
    for row in result["results"]:
        seconds = row["seconds"]
        cells = [
            spread_text(seconds[name], 1e6) if name in seconds else "-"
            for name in ("unfused", "fused", "inductor")
        ]
        yield (
            f"{row['case']:31} {row['rows']:4d}  {cells[0]:21} {cells[1]:21} {cells[2]:21} "
            f"{spread_text(row['gain'])}"
        )
    gains = [row["gain"]["median"] for row in result["results"]]
    yield f"median gain {statistics.median(gains):.2f}, least {min(gains):.2f}, most {max(gains):.2f}"


def main() -> None:
    """Measure, print, and write the record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="write the record there")
    options = parser.parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        result = record()
    print("\n".join(table(result)))
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
