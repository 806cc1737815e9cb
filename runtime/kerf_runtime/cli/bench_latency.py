"""Step times of the engine without HTTP: eager, compiled, compiled and captured, side by side.

Each configuration lives in a process of its own (compilation counters and graphs belong to a process),
and the repeats take turns over the configurations: what else runs on the machine then hits all alike.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kerf_runtime.cli.bench_record import header, spread, spread_text
from kerf_runtime.cli.document import apply_overrides, raw_document
from kerf_runtime.cli.output import echo_table
from kerf_runtime.config import ModelDeploymentDocument
from kerf_runtime.engine.args import EngineArgs
from kerf_runtime.engine.core import EngineCore
from kerf_runtime.engine.messages import AddRequest, SamplingParams
from kerf_runtime.errors import EngineError, KerfError

__all__ = [
    "CONFIGURATIONS",
    "Workload",
    "engine_process",
    "measure",
    "print_table",
    "run_workload",
]

Times = tuple[dict[str, float], list[list[int]]]
"""What ``run_workload`` returns."""

CONFIGURATIONS: dict[str, tuple[str, ...]] = {
    "level 0": ("compilation.level=0", "compilation.cudagraphMode=NONE"),
    "level 3, no graphs": ("compilation.level=3", "compilation.cudagraphMode=NONE"),
    "level 3, graphs": ("compilation.level=3",),
}
"""What is compared; the last one is the document as written."""

_STEADY = ("engine.prefixCaching=false", "compilation.captureMode=eager")
"""Every repeat has the same prompts, which must be computed again, in the graphs that are there in the end."""

_BASELINE = "level 0"
_START_TIMEOUT_SECONDS = 1800
_RUN_TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class Workload:
    """What every configuration runs.  Lengths in tokens; ``batches`` in sequences."""

    batches: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    repeats: int


def measure(
    document: ModelDeploymentDocument, model_path: Path, workload: Workload
) -> dict[str, Any]:
    """Run the workload on every configuration and return the record.

    Raises:
        KerfError: an engine did not start or failed.
    """
    samples: dict[tuple[str, int], list[dict[str, float]]] = {}
    outputs: dict[tuple[str, int], list[list[int]]] = {}
    with ExitStack() as stack:
        cache = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kerf-bench-")))
        engines = {
            name: stack.enter_context(engine_process(document, overrides, model_path, cache))
            for name, overrides in CONFIGURATIONS.items()
        }
        for batch in workload.batches:
            for repeat in range(workload.repeats + 1):
                for name, run in engines.items():
                    times, tokens = run(batch, workload.prompt_tokens, workload.output_tokens)
                    outputs[name, batch] = tokens
                    if repeat > 0:  # the first warms caches up
                        samples.setdefault((name, batch), []).append(times)
    return {
        **header("kerf bench latency"),
        "model": document.name,
        "workload": asdict(workload),
        "results": [
            {
                "configuration": name,
                "batch": batch,
                "prefillSeconds": spread([run["prefill"] for run in runs]),
                "decodeStepSeconds": spread([run["decode"] for run in runs]),
                "prefillSpeedup": spread(_ratios(samples[_BASELINE, batch], runs, "prefill")),
                "decodeStepSpeedup": spread(_ratios(samples[_BASELINE, batch], runs, "decode")),
                "sameTokensAsBaseline": outputs[name, batch] == outputs[_BASELINE, batch],
            }
            for (name, batch), runs in samples.items()
        ],
    }


def print_table(result: dict[str, Any]) -> None:
    """Medians and extremes in milliseconds, and the speed relative to level 0."""
    echo_table(
        ("CONFIGURATION", "BATCH", "PREFILL ms", "x", "DECODE STEP ms", "x", "SAME TOKENS"),
        [
            (
                row["configuration"],
                str(row["batch"]),
                spread_text(row["prefillSeconds"], 1e3),
                f"{row['prefillSpeedup']['median']:.2f}",
                spread_text(row["decodeStepSeconds"], 1e3),
                f"{row['decodeStepSpeedup']['median']:.2f}",
                "yes" if row["sameTokensAsBaseline"] else "no",
            )
            for row in result["results"]
        ],
        right=(1, 2, 3, 4, 5),
    )


def _ratios(base: list[dict[str, float]], runs: list[dict[str, float]], field: str) -> list[float]:
    """Baseline over this, run by run: runs of one round are seconds apart, so a busy machine slows both."""
    return [b[field] / run[field] for b, run in zip(base, runs, strict=True)]


def run_workload(core: EngineCore, batch: int, prompt_tokens: int, output_tokens: int) -> Times:
    """Serve ``batch`` equal-length prompts once.

    Returns:
        Seconds until every prompt had its first token (``prefill``), median and mean seconds of the steps
        after that (``decode``, ``decodeMean``), and the tokens of every sequence.
    """
    vocab_size = core.started_message().vocab_size
    tokens: dict[str, list[int]] = {}
    for index in range(batch):
        # Prompts differ, so that no two sequences can share anything.
        prompt = [
            (7 * position + 31 * index + 11) % vocab_size for position in range(prompt_tokens)
        ]
        params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
        request = AddRequest(f"bench-{index}", prompt, params)
        tokens[request.request_id] = []
        core.add(request)
    prefill, decode = 0.0, []
    while core.has_work:
        all_started = all(tokens.values())
        started = time.perf_counter()
        outputs = core.step()
        seconds = time.perf_counter() - started
        for output in outputs:
            tokens[output.request_id].extend(output.token_ids)
        if all_started:
            decode.append(seconds)
        else:
            prefill += seconds
    times = {
        "prefill": prefill,
        "decode": sorted(decode)[len(decode) // 2],
        "decodeMean": statistics.fmean(decode),
    }
    return times, list(tokens.values())


@contextmanager
def engine_process(
    document: ModelDeploymentDocument, overrides: tuple[str, ...], model_path: Path, cache: Path
) -> Iterator[Callable[[int, int, int], Times]]:
    """A started engine in a process of its own; calling what this gives is ``run_workload`` there.

    Raises:
        EngineError: the process ended without an answer, or did not answer in time.
        KerfError: the engine did not start or failed.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    steady = apply_overrides(document, (*overrides, *_STEADY))
    args = EngineArgs(document=raw_document(steady), model_path=model_path, cache_dir=cache)
    process = context.Process(target=_work, args=(args, theirs))
    process.start()
    theirs.close()

    def run(batch: int, prompt_tokens: int, output_tokens: int) -> Times:
        ours.send((batch, prompt_tokens, output_tokens))
        answer: Times = _receive(ours, _RUN_TIMEOUT_SECONDS)
        return answer

    try:
        _receive(ours, _START_TIMEOUT_SECONDS)
        yield run
    finally:
        ours.close()  # the process ends when it reads the end of the pipe
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()


def _receive(connection: Connection, timeout: float) -> Any:
    if not connection.poll(timeout):
        raise EngineError(f"a benchmark engine did not answer within {timeout:.0f} s")
    try:
        answer = connection.recv()
    except EOFError:
        raise EngineError("a benchmark engine ended without an answer") from None
    if isinstance(answer, KerfError):
        raise answer
    return answer


def _work(args: EngineArgs, connection: Connection) -> None:
    """Body of an engine process."""
    try:
        core = EngineCore(args)
        core.startup()
        connection.send("started")
        while True:
            connection.send(run_workload(core, *connection.recv()))
    except EOFError:
        return
    except KerfError as error:
        connection.send(error)
