"""CPU time of one call of a compiled forward, beyond its kernels: ``python -m benchmarks.overhead``.

A Llama of 32 layers whose kernels are replaced by functions that return prepared results: what is left is
what each way of calling costs by itself.

* level 3: dispatch of the batch, the forward context, and the stitched forward over 33 pieces
* level 2: the bytecode that Dynamo made, without guards
* level 1: Dynamo's guards, then the bytecode
* torch.compile(dynamic=True): the same, as PyTorch's own option

All in one process, in turn.  Guards are counted by Dynamo's own hook.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from benchmarks.dummy import NARROW_32, build
from torch import Tensor, fx

from kerf_runtime.cli.bench_record import header, spread, spread_text
from kerf_runtime.compilation import plan as plan_module
from kerf_runtime.compilation.artifact import load_artifact, write_artifact
from kerf_runtime.compilation.compiler import CompileOptions, compile_model
from kerf_runtime.compilation.counters import compilation_counter
from kerf_runtime.compilation.once import CompiledForward
from kerf_runtime.compilation.piecewise import PiecewiseBackend
from kerf_runtime.compilation.plan import stitch
from kerf_runtime.compilation.trace import count_guard_evaluations
from kerf_runtime.config.compilation import ATTENTION_OPS, CompilationLevel, CUDAGraphMode
from kerf_runtime.cudagraph.descriptor import BatchDescriptor
from kerf_runtime.cudagraph.dispatcher import Dispatcher
from kerf_runtime.forward_context import ForwardContext, set_forward_context

TOKENS, CALLS, RUNS = 8, 300, 7
Forward = Callable[[Tensor, Tensor], Any]


def level_3(device: torch.device, folder: Path) -> dict[str, Forward]:
    """The stitched forward over pieces that compute nothing: alone, and with dispatch and context."""
    model = build(NARROW_32, device=device)
    options = CompileOptions(ATTENTION_OPS, backend="eager")
    compiled = compile_model(model, options, device=device, progress=lambda *_: None)
    write_artifact(folder, compiled.plan, compiled.pieces, compiled.graph_source)
    artifact = load_artifact(folder, model)
    outputs: dict[int, Any] = {}
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    calls = artifact._calls

    def remember(index: int) -> Callable[..., Any]:
        def call(*inputs: Any) -> Any:
            outputs[index] = calls[index](*inputs)
            return outputs[index]

        return call

    first = stitch(artifact.plan, {index: remember(index) for index in calls}, state)
    with set_forward_context(ForwardContext()):
        first(*_batch(device))

    def prepared(index: int) -> PiecewiseBackend:
        result = outputs[index]

        def call(inputs: list[Any]) -> Any:
            inputs.clear()
            return result

        return PiecewiseBackend(call, str(index), recordable=device.type == "cpu")

    find, plan_module._operator = plan_module._operator, lambda _: lambda *_: None
    try:
        forward = stitch(artifact.plan, {index: prepared(index) for index in calls}, state)
    finally:
        plan_module._operator = find
    key = (CUDAGraphMode.PIECEWISE, BatchDescriptor(TOKENS, False))
    dispatcher = Dispatcher(CUDAGraphMode.PIECEWISE, [key])

    def dispatched(input_ids: Tensor, positions: Tensor) -> Any:
        decision = dispatcher.dispatch(TOKENS, uniform_decode=False)
        context = ForwardContext(mode=decision.mode, descriptor=decision.descriptor)
        with set_forward_context(context):
            return forward(input_ids, positions)

    return {"level 3, stitching alone": forward, "level 3, dispatch and stitching": dispatched}


def _prepared_backend(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """A Dynamo back end whose code returns what the graph returned the first time."""
    results: list[Any] = []

    def call(*arguments: Any) -> Any:
        if not results:
            results.append(module.forward(*arguments))
        return results[0]

    return call


def whole_graph(device: torch.device) -> dict[str, Forward]:
    """Levels 2 and 1 and torch.compile(dynamic=True), with the graph's result prepared."""

    class Prepared(CompiledForward):
        def _compile(self, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            return _prepared_backend(module, inputs)

    forwards: dict[str, Forward] = {}
    for label, level in (
        ("level 2", CompilationLevel.DYNAMO_ONCE),
        ("level 1", CompilationLevel.DYNAMO_AS_IS),
    ):
        forwards[label] = Prepared(build(NARROW_32, device=device), level=level)
    model = build(NARROW_32, device=device)
    forwards["torch.compile(dynamic=True)"] = torch.compile(
        model, backend=_prepared_backend, dynamic=True
    )
    return forwards


def _batch(device: torch.device) -> tuple[Tensor, Tensor]:
    ids = torch.zeros(TOKENS, dtype=torch.int64, device=device)
    return ids, torch.arange(TOKENS, device=device)


def measure(forwards: dict[str, Forward], device: torch.device) -> Iterator[dict[str, Any]]:
    """Microseconds per call of each forward, in turn; guards per call."""
    batch = _batch(device)
    times: dict[str, list[float]] = {name: [] for name in forwards}
    guards: dict[str, float] = {}
    count_guard_evaluations()
    with set_forward_context(ForwardContext()):
        for forward in forwards.values():
            for _ in range(3):
                forward(*batch)
        for _ in range(RUNS):
            for name, forward in forwards.items():
                before = compilation_counter.guards_evaluated
                started = time.perf_counter()
                for _ in range(CALLS):
                    forward(*batch)
                times[name].append((time.perf_counter() - started) / CALLS * 1e6)
                guards[name] = (compilation_counter.guards_evaluated - before) / CALLS
    for name, values in times.items():
        yield {
            "configuration": name,
            "microseconds": spread(values),
            "guardEvaluationsPerCall": guards[name],
        }


def record(device: torch.device, folder: Path) -> dict[str, Any]:
    """The whole benchmark on one device."""
    result = header("benchmarks.overhead")
    if device.type == "cuda":
        result["machine"]["gpu"] = torch.cuda.get_device_name(0)
    result["command"] = ["python", "-m", "benchmarks.overhead"]
    result["model"] = f"32 layers, {device.type}"
    with torch.inference_mode(False), torch.no_grad():
        # Level 3 last: tracing resets what Dynamo keeps for the others.
        stitched = level_3(device, folder / "artifact")
        result["results"] = list(measure({**stitched, **whole_graph(device)}, device))
    return result


def table(result: dict[str, Any]) -> Iterator[str]:
    """The record as a Markdown table."""
    yield f"CPU time per call of {TOKENS} tokens, kernels taken out; {RUNS} runs of {CALLS} calls in turn."
    yield ""
    yield "| configuration | us per call | guard evaluations per call |"
    yield "|---|---|---|"
    for row in result["results"]:
        cells = (row["configuration"], spread_text(row["microseconds"], digits=1))
        yield f"| {cells[0]} | {cells[1]} | {row['guardEvaluationsPerCall']:g} |"


def main() -> None:
    """Measure, print, and write the record if asked to."""
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="write the record there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = record(torch.device(options.device), Path(folder))
    print("\n".join(table(result)))
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
