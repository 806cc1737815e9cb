"""Cost of recorded graphs on a GPU: ``python -m benchmarks.capture [--layers 32] [--output FILE]``.

A model of Llama-8B's shape with random weights, run by its own Python code (level 0), with one graph for
each decode size up to 256: seconds, nodes and bytes per size, and the time of a decode step with and
without its graph.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.dummy import LLAMA_8B, build

from kerf_runtime.cli.bench_record import header, spread
from kerf_runtime.compilation.prepare import PreparedModel
from kerf_runtime.config import CompilationLevel, CUDAGraphMode, DType, parse_document, resolve
from kerf_runtime.cudagraph.descriptor import BatchDescriptor, DispatchDecision
from kerf_runtime.cudagraph.runner import GraphRunner, named_tensors
from kerf_runtime.engine.kv_cache import allocate_kv_cache
from kerf_runtime.engine.runner import ModelRunner
from kerf_runtime.engine.scheduler import SchedulerLimits
from kerf_runtime.models.llama.model import attention_layer_names
from kerf_runtime.platforms import current_platform
from kerf_runtime.reasons import DispatchReason

RUNS = 7
LENGTH = 160
"""Tokens of every sequence in the timed steps: 32 of prompt and 128 of answer."""


def record(layers: int) -> dict[str, Any]:
    """Capture all sizes, then time steps."""
    platform = current_platform()
    config = replace(LLAMA_8B, num_layers=layers)
    model = build(config, device=platform.device)
    document = parse_document(
        {
            "apiVersion": "kerf.dev/v1alpha1",
            "kind": "ModelDeployment",
            "metadata": {"name": "bench"},
            "spec": {
                "model": {"source": {"pvc": {"claimName": "models"}}},
                "engine": {"maxNumSeqs": 256, "maxNumBatchedTokens": 2048, "maxModelLen": LENGTH},
                "compilation": {"level": 0, "cudagraphMode": "FULL_DECODE_ONLY"},
            },
        },
        where="bench",
    )
    effective = resolve(
        document.spec, platform=platform.facts(), model_max_len=8192, model_dtype=DType.BFLOAT16
    )
    limits = SchedulerLimits(
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        max_model_len=LENGTH,
        vocab_size=config.vocab_size,
        block_size=16,
        num_blocks=256 * LENGTH // 16,
    )
    caches = allocate_kv_cache(
        attention_layer_names(config),
        config,
        num_blocks=limits.num_blocks,
        block_size=16,
        dtype=torch.bfloat16,
        device=platform.device,
    )
    runner = ModelRunner(
        model,
        limits,
        capture_sizes=effective.capture_sizes,
        kv_caches=caches,
        device=platform.device,
    )
    graphs = GraphRunner(
        PreparedModel(model, CompilationLevel.NO_COMPILATION, None),
        effective,
        platform,
        max_num_seqs=256,
        weights=lambda: named_tensors(model),
    )
    for size, uniform in ((64, False), (256, True), (1, True)):
        decision = DispatchDecision(
            CUDAGraphMode.NONE, BatchDescriptor(size, uniform), DispatchReason.MODE_NONE
        )
        graphs.run(decision, *runner.make_dummy_batch(decision.descriptor))
    torch.cuda.synchronize()
    started = time.perf_counter()
    graphs.capture_all(runner.make_dummy_batch, lambda *_: None)
    seconds = time.perf_counter() - started
    report = graphs.report()
    found = report["descriptors"]
    result = header("benchmarks.capture")
    result["machine"]["gpu"] = torch.cuda.get_device_name()
    result["command"] = ["python", "-m", "benchmarks.capture", "--layers", str(layers)]
    result["model"] = f"Llama-8B's shape, {layers} layers, bfloat16, random weights, level 0"
    nodes = sum(graph["nodes"] for graph in found)
    result["capture"] = {
        "graphs": len(found),
        "seconds": seconds,
        "recordingSeconds": sum(graph["seconds"] for graph in found),
        "nodes": nodes,
        "bytes": report["memory_bytes"],
        "secondsPerNode": sum(graph["seconds"] for graph in found) / nodes,
        "bytesPerNode": report["memory_bytes"] / nodes,
        "sizes": found,
    }
    result["steps"] = [
        step(graphs, runner, size, mode)
        for size in (1, 8, 64, 256)
        for mode in (CUDAGraphMode.FULL, CUDAGraphMode.NONE)
    ]
    return result


def step(
    graphs: GraphRunner, runner: ModelRunner, size: int, mode: CUDAGraphMode
) -> dict[str, Any]:
    """Seconds of one decode forward, input copies included, logits and sampling not."""
    descriptor = BatchDescriptor(size, True)
    decision = DispatchDecision(mode, descriptor, DispatchReason.EXACT)
    count, times = 20, []
    inputs = runner.make_dummy_batch(descriptor)
    graphs.run(decision, *inputs)
    for _ in range(RUNS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            graphs.run(decision, *inputs)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - started) / count)
    return {"batch": size, "mode": mode.value, "seconds": spread(times)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--output", type=Path, help="write the record there")
    options = parser.parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        result = record(options.layers)
    cost = result["capture"]
    print(
        f"{cost['graphs']} graphs in {cost['seconds']:.2f} s ({cost['recordingSeconds']:.2f} s recording), "
        f"{cost['nodes']} nodes, {cost['bytes'] / 2**20:.0f} MiB: "
        f"{cost['secondsPerNode'] * 1e6:.1f} us and {cost['bytesPerNode'] / 1024:.1f} KiB per node"
    )
    for row in result["steps"]:
        median = statistics.median([row["seconds"]["median"]])
        print(f"batch {row['batch']:4d} {row['mode']:5s} {median * 1e3:7.3f} ms")
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
