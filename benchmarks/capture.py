"""Cost of recorded graphs on a GPU: ``python -m benchmarks.capture [--level 3] [--output FILE]``.

A model of Llama-8B's shape with random weights.  At level 3 its compiled pieces are recorded for 51 sizes
of mixed batches and its whole forward for 35 sizes of decode batches (mode FULL_AND_PIECEWISE); at level 0
there are the decode graphs only.  The record has seconds, nodes and bytes of each mode and size, and the
time of a decode step from its full graph, from the graphs of its pieces, and without graphs.  Small full graphs compute
logits and the likeliest tokens too; where a step has none from a graph they are computed behind it.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.dummy import LLAMA_8B, build
from torch import Tensor, nn

from kerf_runtime.cli.bench_record import header, spread, spread_text
from kerf_runtime.compilation.artifact import load_artifact, write_artifact
from kerf_runtime.compilation.compiler import CompileOptions, compile_model
from kerf_runtime.compilation.prepare import PreparedModel
from kerf_runtime.config import CompilationLevel, CUDAGraphMode, DType, parse_document, resolve
from kerf_runtime.config.compilation import ATTENTION_OPS
from kerf_runtime.config.passes import PassConfig
from kerf_runtime.config.resolve import EffectiveConfig
from kerf_runtime.cudagraph.decode_head import DecodeHead
from kerf_runtime.cudagraph.descriptor import BatchDescriptor, DispatchDecision
from kerf_runtime.cudagraph.runner import GraphRunner, named_tensors
from kerf_runtime.engine.kv_cache import allocate_kv_cache
from kerf_runtime.engine.runner import ModelRunner
from kerf_runtime.engine.scheduler import SchedulerLimits
from kerf_runtime.models.llama.model import attention_layer_names
from kerf_runtime.platforms import current_platform
from kerf_runtime.reasons import DispatchReason

RUNS, CALLS = 7, 20
BATCHES = (1, 8, 64, 256)
MAX_SEQS, MAX_TOKENS = 256, 2048
SIZES = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
"""Of mixed batches; decode batches stop at MAX_SEQS, the 35th."""
LENGTH = 160
"""Tokens of every sequence in the timed steps: 32 of prompt and 128 of answer."""


@dataclass(frozen=True)
class Bench:
    """What is captured and run."""

    effective: EffectiveConfig
    runner: ModelRunner
    graphs: GraphRunner
    compute_logits: Callable[[Tensor], Tensor]


def prepared_model(model: nn.Module, level: int, artifact: Path) -> PreparedModel:
    """The model as the engine would have it; compiled pieces are taken from ``artifact`` if it exists."""
    if level == 0:
        return PreparedModel(model, CompilationLevel.NO_COMPILATION, None)
    if not artifact.exists():
        options = CompileOptions(ATTENTION_OPS, passes=PassConfig(), static_graphs=True)
        compiled = compile_model(
            model, options, device=current_platform().device, progress=lambda *_: None
        )
        write_artifact(artifact, compiled.plan, compiled.pieces, compiled.graph_source)
    return PreparedModel(model, CompilationLevel.PIECEWISE, load_artifact(artifact, model))


def bench(level: int, layers: int, length: int, artifact: Path, warmups: int = 1) -> Bench:
    """Everything up to the capture, each kernel used once."""
    platform = current_platform()
    config = replace(LLAMA_8B, num_layers=layers)
    model = build(config, device=platform.device)
    mode = "FULL_DECODE_ONLY" if level == 0 else "FULL_AND_PIECEWISE"
    document = parse_document(
        {
            "apiVersion": "kerf.dev/v1alpha1",
            "kind": "ModelDeployment",
            "metadata": {"name": "bench"},
            "spec": {
                "model": {"source": {"pvc": {"claimName": "models"}}},
                "engine": {
                    "maxNumSeqs": MAX_SEQS,
                    "maxNumBatchedTokens": MAX_TOKENS,
                    "maxModelLen": length,
                },
                "compilation": {
                    "level": level,
                    "cudagraphMode": mode,
                    "captureSizes": list(SIZES),
                },
            },
        },
        where="bench",
    )
    effective = resolve(
        document.spec, platform=platform.facts(), model_max_len=8192, model_dtype=DType.BFLOAT16
    )
    limits = SchedulerLimits(
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=MAX_TOKENS,
        max_model_len=length,
        vocab_size=config.vocab_size,
        block_size=16,
        num_blocks=MAX_SEQS * LENGTH // 16,
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
    compute_logits: Callable[[Tensor], Tensor] = model.compute_logits  # type: ignore[assignment]
    graphs = GraphRunner(
        prepared_model(model, level, artifact),
        effective,
        platform,
        max_num_seqs=MAX_SEQS,
        num_warmups=warmups,
        weights=lambda: named_tensors(model),
        head=DecodeHead(
            compute_logits,
            vocab_size=config.vocab_size,
            dtype=torch.bfloat16,
            largest=max(effective.capture_sizes),
            device=platform.device,
        ),
    )
    for size, uniform in ((64, False), (1, True)):
        descriptor = BatchDescriptor(size, uniform)
        decision = DispatchDecision(CUDAGraphMode.NONE, descriptor, DispatchReason.MODE_NONE)
        graphs.run(decision, *runner.make_dummy_batch(descriptor))
    return Bench(effective, runner, graphs, compute_logits)


def capture(made: Bench, profile: Path | None) -> dict[str, Any]:
    """Estimate the memory, then capture everything once; seconds and bytes of each mode.

    Args:
        profile: where to write what Python spent its time on; profiling makes everything slower.
    """
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = current_platform().memory()
    started = time.perf_counter()
    made.graphs.estimate_memory(made.runner.make_dummy_batch, lambda *_: None)
    trial_seconds = time.perf_counter() - started
    marks: list[tuple[str, float]] = []
    profiler = cProfile.Profile() if profile else None
    started = time.perf_counter()
    if profiler:
        profiler.enable()
    made.graphs.capture_all(
        made.runner.make_dummy_batch,
        lambda what, _: marks.append((what.partition(" ")[0], time.perf_counter())),
    )
    if profiler:
        profiler.disable()
    ended = time.perf_counter()
    torch.cuda.empty_cache()
    after = current_platform().memory()
    assert before is not None
    assert after is not None
    if profiler and profile:
        with profile.open("w") as stream:
            pstats.Stats(profiler, stream=stream).sort_stats("tottime").print_stats(40)
    seconds: dict[str, float] = {}
    for (mode, begin), (_, end) in zip(marks, [*marks[1:], ("", ended)], strict=True):
        seconds[mode] = seconds.get(mode, 0.0) + end - begin
    report = made.graphs.report()
    return {
        "graphs": report["captured"],
        "trialSeconds": trial_seconds,
        "seconds": ended - started,
        "beforeFirstSeconds": marks[0][1] - started,
        "nodes": sum(graph["nodes"] for graph in report["descriptors"]),
        "bytes": report["memory_bytes"],
        "sharedBytes": report["shared_bytes"],
        "estimatedBytes": report["estimated_bytes"],
        "estimateError": report["estimate_error"],
        "bytesOfPyTorch": after.reserved - before.reserved,
        "bytesOfDevice": before.free - after.free,
        "modes": [_mode(name, seconds[name], report["descriptors"]) for name in seconds],
        "sizes": report["descriptors"],
    }


def _mode(name: str, seconds: float, descriptors: list[dict[str, Any]]) -> dict[str, Any]:
    found = [graph for graph in descriptors if graph["mode"] == name]
    nodes = sum(graph["nodes"] for graph in found)
    recording = sum(graph["seconds"] for graph in found)
    held = sum(graph["bytes"] for graph in found)
    return {
        "mode": name,
        "graphs": len(found),
        "nodes": nodes,
        "seconds": seconds,
        "recordingSeconds": recording,
        "bytes": held,
        "secondsPerNode": recording / nodes,
        "bytesPerNode": held / nodes,
    }


@torch.inference_mode()
def decode(made: Bench, decision: DispatchDecision, inputs: Any) -> None:
    """One forward, logits and the likeliest tokens, as far as the graph does not compute them itself."""
    output = made.graphs.run(decision, *inputs)
    if output.decoded is None:
        made.compute_logits(output.hidden).argmax(dim=-1)


def steps(made: Bench, level: int) -> Iterator[dict[str, Any]]:
    """Seconds of one greedy decode step on the device in each mode, in turn; inputs are in place."""
    modes = [CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE]
    if level == 0:
        modes.remove(CUDAGraphMode.PIECEWISE)
    for size in BATCHES:
        inputs = made.runner.make_dummy_batch(BatchDescriptor(size, True))
        times: dict[CUDAGraphMode, list[float]] = {mode: [] for mode in modes}
        for _ in range(RUNS):
            for mode in modes:
                descriptor = BatchDescriptor(size, mode is not CUDAGraphMode.PIECEWISE)
                decision = DispatchDecision(mode, descriptor, DispatchReason.EXACT)
                decode(made, decision, inputs)
                torch.cuda.synchronize()
                started = time.perf_counter()
                for _ in range(CALLS):
                    decode(made, decision, inputs)
                torch.cuda.synchronize()
                times[mode].append((time.perf_counter() - started) / CALLS)
        for mode, values in times.items():
            ratios = [a / b for a, b in zip(values, times[CUDAGraphMode.FULL], strict=True)]
            yield {
                "batch": size,
                "mode": mode.value,
                "seconds": spread(values),
                "ofFull": spread(ratios),
            }


def record(options: argparse.Namespace, artifact: Path) -> dict[str, Any]:
    """Capture all sizes, then time steps."""
    made = bench(options.level, options.layers, options.length, artifact, options.warmups)
    result = header("benchmarks.capture")
    result["machine"]["gpu"] = torch.cuda.get_device_name()
    result["command"] = [
        *("python", "-m", "benchmarks.capture", "--level", str(options.level)),
        *("--layers", str(options.layers), "--length", str(options.length)),
        *("--warmups", str(options.warmups)),
    ]
    result["model"] = (
        f"Llama-8B's shape, {options.layers} layers, bfloat16, random weights, level {options.level}, "
        f"sequences of up to {options.length} tokens"
    )
    result["capture"] = capture(made, options.profile)
    # Longer sequences have no blocks of their own here: their timing would mean nothing.
    result["timed"] = "forward, logits and tokens"
    result["steps"] = list(steps(made, options.level)) if options.length == LENGTH else []
    return result


def table(result: dict[str, Any]) -> Iterator[str]:
    """The record as Markdown."""
    cost = result["capture"]
    yield (
        f"On {result['machine']['gpu']}: {cost['graphs']} graphs of {cost['nodes']} nodes together in "
        f"{cost['seconds']:.2f} s and {cost['bytes'] / 2**20:.0f} MiB. Free device memory went down by "
        f"{cost['bytesOfDevice'] / 2**20:.0f} MiB, of which PyTorch holds "
        f"{cost['bytesOfPyTorch'] / 2**20:.0f} MiB. Before, trial captures of {cost['trialSeconds']:.2f} s had "
        f"foretold {cost['estimatedBytes'] / 2**20:.0f} MiB: {cost['estimateError']:+.1%}."
    )
    yield ""
    yield "| mode | sizes | nodes | seconds | of that recording | MiB | us per node | KiB per node |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in cost["modes"]:
        yield (
            f"| {row['mode']} | {row['graphs']} | {row['nodes']} | {row['seconds']:.2f} | "
            f"{row['recordingSeconds']:.2f} | {row['bytes'] / 2**20:.0f} | "
            f"{row['secondsPerNode'] * 1e6:.1f} | {row['bytesPerNode'] / 1024:.1f} |"
        )
    if not result["steps"]:
        return
    yield ""
    # Older records have the forward alone.
    yield f"| batch | mode | decode {result.get('timed', 'forward')}, ms | ratio to FULL |"
    yield "|---|---|---|---|"
    for row in result["steps"]:
        yield (
            f"| {row['batch']} | {row['mode']} | {spread_text(row['seconds'], 1e3, 3)} | "
            f"{spread_text(row['ofFull'], digits=3)} |"
        )


def main() -> None:
    """Measure, print, and write the record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--level", type=int, choices=(0, 3), default=3)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--length", type=int, default=LENGTH, help="longest sequence, in tokens")
    parser.add_argument("--warmups", type=int, default=1, help="runs of each size before capture")
    parser.add_argument(
        "--artifact", type=Path, help="keep the compiled pieces there, or take them"
    )
    parser.add_argument(
        "--profile", type=Path, help="profile the capture and write a listing there"
    )
    parser.add_argument("--output", type=Path, help="write the record there")
    options = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        result = record(options, options.artifact or Path(folder) / "artifact")
    print("\n".join(table(result)))
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
