"""Steps of the whole engine without HTTP: ``python -m benchmarks.decode [--model llama-8b] [--output FILE]``.

Models of a known shape with random weights answer prompts of 32 tokens with 128 tokens each.  A decode
step is everything between two tokens: scheduling, inputs, forward, sampling, reading the tokens.  Steps
that overlap are compared with steps that wait for each other in the same process, in turns.  The part of
the time in which the GPU does nothing is taken from a trace of its kernels.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from benchmarks.shapes import ANSWER, CONFIGS, PROMPT

from kerf_runtime.cli.bench_latency import run_workload
from kerf_runtime.cli.bench_record import header, spread, spread_text
from kerf_runtime.engine.args import EngineArgs
from kerf_runtime.engine.core import EngineCore

RUNS = 5
BATCHES = {"llama-8b": (1, 8, 64, 256), "opt-125m": (1, 64), "tiny": (1, 4)}
_WAYS = {"overlapping": True, "waiting": False}


def start(model: str, folder: Path) -> EngineCore:
    """An engine at level 3 in mode FULL_AND_PIECEWISE with the default sizes."""
    (folder / "config.json").write_text(json.dumps(CONFIGS[model]))
    document = {
        "apiVersion": "kerf.dev/v1alpha1",
        "kind": "ModelDeployment",
        "metadata": {"name": "bench"},
        "spec": {
            "model": {"source": {"pvc": {"claimName": "models"}}, "loadFormat": "dummy"},
            "engine": {
                "maxNumSeqs": max(BATCHES[model]),
                "maxNumBatchedTokens": max(512, 8 * max(BATCHES[model])),
                "maxModelLen": PROMPT + ANSWER + 32,
                "dtype": CONFIGS[model]["dtype"],
                "prefixCaching": False,
            },
        },
    }
    core = EngineCore(EngineArgs(document, folder, None))
    core.startup()
    return core


def measure(core: EngineCore, batch: int) -> dict[str, Any]:
    """Decode steps of one batch, overlapping and not, in turns."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for run in range(RUNS + 1):
        for overlap in (True, False):
            core.overlap = overlap
            seconds, _ = run_workload(core, batch, PROMPT, ANSWER)
            if run:  # the first warms caches up
                times[overlap].append(seconds["decode"])
    return {
        "batch": batch,
        **{name: {"seconds": spread(times[overlap])} for name, overlap in _WAYS.items()},
    }


def idle_share(core: EngineCore, batch: int) -> float | None:
    """Part of the time of decode steps in which no kernel and no copy ran; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run_workload(core, batch, PROMPT, ANSWER)
        torch.cuda.synchronize()
    spans = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in profile.profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA
    )
    # The prompts' steps at the beginning are not decode steps.
    spans = spans[len(spans) // 4 :]
    busy, end = 0, spans[0][0]
    for first, last in spans:
        busy += max(0, last - max(first, end))
        end = max(end, last)
    return 1 - busy / (end - spans[0][0])


def record(model: str) -> dict[str, Any]:
    """Start the engine, then measure each batch."""
    with tempfile.TemporaryDirectory() as folder:
        core = start(model, Path(folder))
        report = core.report()
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
        common = header("benchmarks.decode")
        steps = [measure(core, batch) for batch in BATCHES[model]]
        # Once it was used the profiler slows every launch down, so nothing is timed after it.
        for row in steps:
            for name, overlap in _WAYS.items():
                core.overlap = overlap
                row[name]["idleShare"] = idle_share(core, row["batch"])
        return {
            **common,
            "machine": {**common["machine"], "gpu": gpu},
            "command": ["python", "-m", "benchmarks.decode", "--model", model],
            "model": f"{model}'s shape, random weights, level 3, {report['effective']['mode']}; "
            f"prompts of {PROMPT} and answers of {ANSWER} tokens, greedy",
            "startupSeconds": report["startup"],
            "steps": steps,
        }


def table(result: dict[str, Any]) -> Iterator[str]:
    """The record as Markdown."""
    yield f"On {result['machine']['gpu']}: {result['model']}."
    yield ""
    yield "| batch | overlapping, ms | GPU idle | waiting, ms | GPU idle |"
    yield "|---|---|---|---|---|"
    for row in result["steps"]:
        cells = []
        for name in _WAYS:
            idle = row[name]["idleShare"]
            cells += [
                spread_text(row[name]["seconds"], 1e3, 3),
                "-" if idle is None else f"{idle:.1%}",
            ]
        yield f"| {row['batch']} | {' | '.join(cells)} |"


def main() -> None:
    """Measure, print, and write the record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=CONFIGS, default="llama-8b")
    parser.add_argument("--output", type=Path, help="write the record there")
    options = parser.parse_args()
    result = record(options.model)
    print("\n".join(table(result)))
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
