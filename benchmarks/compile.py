"""Cold compile of a Llama-8B on a GPU: ``python -m benchmarks.compile [--output FILE]``.

The weights are random.  Every run traces a new module (with the same weights) and compiles its distinct
pieces for the general shape from an empty cache.  ``KERF_COMPILE_WORKERS`` is set for each configuration.
*First* is the first compilation of a process of its own, which imports the compiler, as a compile Job does.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.dummy import LLAMA_8B, build

from kerf_runtime.cli.bench_record import header, spread, spread_text
from kerf_runtime.compilation.artifact import load_artifact, write_artifact
from kerf_runtime.compilation.compiler import CompiledModel, CompileOptions, compile_model
from kerf_runtime.compilation.counters import compilation_counter
from kerf_runtime.compilation.workers import WORKERS_VARIABLE, start_fork_server
from kerf_runtime.config.compilation import ATTENTION_OPS
from kerf_runtime.config.passes import PassConfig
from kerf_runtime.forward_context import ForwardContext, set_forward_context

RUNS = 3
CONFIGURATIONS = (("one process", "0"), ("3 worker processes", "3"))
PHASES = ("trace", "split", "workers", "inductor", "kernels", "save", "load", "total")


def run_once(config: Any, state: Any, device: torch.device) -> tuple[dict[str, float], int, int]:
    """Seconds per phase of one cold compile, its peak of allocated bytes, and the artifact's size."""
    model = build(config, device=device, state=state)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    began = time.perf_counter()
    compiled: CompiledModel = compile_model(
        model,
        CompileOptions(ATTENTION_OPS, passes=PassConfig()),
        device=device,
        progress=lambda *_: None,
    )
    allocated = torch.cuda.max_memory_allocated() - before
    seconds = {"workers": 0.0, **compiled.timings}
    seconds["kernels"] = sum(piece.general.kernel_seconds for piece in compiled.pieces.values())
    folder = Path(tempfile.mkdtemp()) / "artifact"
    started = time.perf_counter()
    write_artifact(folder, compiled.plan, compiled.pieces, compiled.graph_source)
    seconds["save"] = time.perf_counter() - started
    seconds["total"] = time.perf_counter() - began
    started = time.perf_counter()
    artifact = load_artifact(folder, model)
    seconds["load"] = time.perf_counter() - started
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    _compare(artifact.forward, model, device)
    shutil.rmtree(folder.parent)
    return seconds, allocated, size


@torch.inference_mode()
def _compare(compiled: Any, eager: Any, device: torch.device) -> None:
    """What was timed must also be right: as near to the model in float32 as the eager model is."""
    ids = torch.arange(7, device=device)
    exact = copy.deepcopy(eager).float()
    with set_forward_context(ForwardContext()):
        expected, plain, actual = (f(ids, ids).float() for f in (exact, eager, compiled))
    allowed, error = (float((x - expected).norm() / expected.norm()) for x in (plain, actual))
    if not error < 1.25 * allowed:
        raise SystemExit(
            f"the compiled model's relative error is {error:.3g}, the eager model's {allowed:.3g}"
        )


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {phase: round(value, 2) for phase, value in seconds.items()}


def _first(workers: str) -> dict[str, float]:
    """Seconds per phase of the first compilation of a new process."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.compile", "--first"],
        env={**os.environ, WORKERS_VARIABLE: workers},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def _print_first() -> None:
    device = torch.device("cuda")
    start_fork_server("inductor", device)  # before the weights, as the engine does
    state = dict(build(LLAMA_8B, device=device).named_parameters())
    print(json.dumps(run_once(LLAMA_8B, state, device)[0]))


def record(configurations: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """The given configurations, alternating."""
    device = torch.device("cuda")
    result = header("benchmarks.compile")
    result["machine"]["gpu"] = torch.cuda.get_device_name(0)
    result["command"] = ["python", "-m", "benchmarks.compile"]
    result["model"] = "Llama-8B shape, random weights, bfloat16"
    result["first"] = {}
    for name, workers in configurations:
        result["first"][name] = _first(workers)
        print("first", name, _rounded(result["first"][name]), flush=True)
    state = dict(build(LLAMA_8B, device=device).named_parameters())
    runs: dict[str, list[dict[str, float]]] = {name: [] for name, _ in configurations}
    result["allocatedBytes"] = 0
    before = compilation_counter.snapshot()
    for number in range(RUNS + 1):
        for name, workers in configurations:
            os.environ[WORKERS_VARIABLE] = workers
            seconds, allocated, size = run_once(LLAMA_8B, state, device)
            result["allocatedBytes"] = max(result["allocatedBytes"], allocated)
            result["artifactBytes"] = size
            print(number, name, _rounded(seconds), flush=True)
            if number > 0:  # imports are done after the first
                runs[name].append(seconds)
    after = compilation_counter.snapshot()
    compiled = after["inductor_compilations"] - before["inductor_compilations"]
    result["compilationsPerRun"] = compiled / (RUNS + 1) / len(configurations)
    result["results"] = [
        {
            "configuration": name,
            "seconds": {phase: spread([run[phase] for run in runs[name]]) for phase in PHASES},
        }
        for name, _ in configurations
    ]
    return result


def table(result: dict[str, Any]) -> Iterator[str]:
    """The record as a Markdown table."""
    yield (
        f"{result['compilationsPerRun']:g} compilations a run for the general shape; the artifact has "
        f"{result['artifactBytes'] / 2**20:.2f} MiB. Device memory allocated while compiling: "
        f"{result['allocatedBytes']} bytes. Seconds; *first* is the first compilation of a process, which "
        "imports the compiler; *workers* is the time that worker processes were waited for, *kernels* what of "
        "*inductor* Triton was waited for, summed over pieces, which workers compile at once."
    )
    yield ""
    phases = [phase for phase in PHASES if phase in result["results"][0]["seconds"]]
    yield "| configuration | " + " | ".join(phases) + " |"
    yield "|---" * (len(phases) + 1) + "|"
    for row in result["results"]:
        first = result["first"][row["configuration"]]
        yield f"| {row['configuration']}, first | {' | '.join(f'{first[p]:.2f}' for p in phases)} |"
        cells = [spread_text(row["seconds"][phase]) for phase in phases]
        yield f"| {row['configuration']} | {' | '.join(cells)} |"


def main() -> None:
    """Measure, print, and write the record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="write the record there")
    parser.add_argument("--one-process", action="store_true", help="leave out the workers")
    parser.add_argument("--first", action="store_true", help="compile once, print the seconds")
    options = parser.parse_args()
    if options.first:
        _print_first()
        return
    result = record(CONFIGURATIONS[:1] if options.one_process else CONFIGURATIONS)
    print("\n".join(table(result)))
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
