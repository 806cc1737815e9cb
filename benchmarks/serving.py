"""A real server, from its start to 256 clients: ``python -m benchmarks.serving [--model llama-8b] [--output FILE]``.

A checkpoint of a known shape is made on disk and served by ``kerf serve``:

* the time from the process's start to the first token: with nothing compiled, then with the compile cache that
  this start filled, once as in a new pod, which has none of Triton's own files, and as on the same machine;
* one client, one request at a time: the time per token, beside the engine's step in the same server and in a
  process without HTTP;
* many clients at once, in processes of their own: the throughput, and where the server's time goes.

After every part the record is written, so that a run that is cut off leaves what it had.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from benchmarks.clients import warm_clients
from benchmarks.shapes import ANSWER, CONFIGS, PROMPT
from benchmarks.spent import cpu_seconds, most_frequent, steps_between, steps_of

from kerf_runtime.cli.bench_latency import engine_process
from kerf_runtime.cli.bench_record import header, spread, spread_text
from kerf_runtime.cli.bench_server import write_document
from kerf_runtime.cli.bench_startup import measured_start, phase_rows, summary
from kerf_runtime.cli.bench_throughput import BUSY_SHARE
from kerf_runtime.cli.load import Load, Target, ask, plan, summarize
from kerf_runtime.config import ModelDeploymentDocument, parse_document
from kerf_runtime.errors import EngineError

__all__ = ["Bench", "Setup", "difference", "record", "table"]

REPEATS, WARM_UPS = 10, 2
"""Requests of the one client."""
_SETTLE_SECONDS = 0.3
"""The engine tells its numbers four times a second."""


@dataclass(frozen=True)
class Setup:
    """The limits of the engine, of which the first is also the number of clients, and the load."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    requests: int


SETUPS = {
    "llama-8b": Setup(256, 2048, 512, 1024),
    "opt-125m": Setup(256, 2048, 512, 2048),
    "tiny": Setup(8, 64, 256, 64),
}


@dataclass(frozen=True)
class Bench:
    """What is served, and where everything lies."""

    model: str
    folder: Path
    processes: int = 1
    """Of clients."""
    warm_starts: int = 1
    """On the same machine; the last of these servers is measured."""

    @property
    def setup(self) -> Setup:
        return SETUPS[self.model]

    @property
    def checkpoint(self) -> Path:
        return self.folder / "model"

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    @property
    def vocab_size(self) -> int:
        size: int = CONFIGS[self.model]["vocab_size"]
        return size

    def document(self) -> ModelDeploymentDocument:
        """Level 3 in mode FULL_AND_PIECEWISE with the default sizes."""
        data = {
            "apiVersion": "kerf.dev/v1alpha1",
            "kind": "ModelDeployment",
            "metadata": {"name": self.model},
            "spec": {
                "model": {"source": {"pvc": {"claimName": "models"}}},
                "engine": {
                    "maxNumSeqs": self.setup.max_num_seqs,
                    "maxNumBatchedTokens": self.setup.max_num_batched_tokens,
                    "maxModelLen": self.setup.max_model_len,
                    "dtype": CONFIGS[self.model]["dtype"],
                    # As in the engine without HTTP, whose repeats have the same prompts.
                    "prefixCaching": False,
                },
            },
        }
        return parse_document(data, where="the benchmark's document")

    def target(self, url: str) -> Target:
        return Target(f"{url}/v1", self.model)


def record(bench: Bench) -> Iterator[dict[str, Any]]:
    """The record, again and again as parts are added to it.

    Raises:
        EngineError: the checkpoint could not be made, a server did not become ready, or a request failed.
    """
    made = make_checkpoint(bench)
    common = header("benchmarks.serving")
    result: dict[str, Any] = {
        **common,
        "machine": {**common["machine"], "gpu": made["gpu"]},
        "command": ["python", "-m", "benchmarks.serving", "--model", bench.model],
        "model": f"{bench.model}'s shape, random weights on disk, level 3, FULL_AND_PIECEWISE; prompts of "
        f"{PROMPT} and answers of {ANSWER} tokens, greedy",
        "setup": asdict(bench.setup),
        "checkpoint": {"bytes": made["bytes"], "secondsToMake": made["seconds"]},
        "starts": [],
    }
    file = write_document(bench.document(), bench.folder)
    for kind in ("cold", "warm, new pod"):
        # Only the compile cache outlives a pod; what Triton keeps for itself does not.
        os.environ["TRITON_CACHE_DIR"] = str(bench.folder / f"triton-{kind.partition(',')[0]}")
        with measured_start(file, bench.checkpoint, bench.cache, bench.model) as (_, start):
            result["starts"].append(_told(kind, [start], made["bytes"]))
        yield result
    starts = []
    for _ in range(bench.warm_starts - 1):
        with measured_start(file, bench.checkpoint, bench.cache, bench.model) as (_, start):
            starts.append(start)
    with measured_start(file, bench.checkpoint, bench.cache, bench.model) as (url, start):
        starts.append(start)
        result["starts"].append(_told("warm, same machine", starts, made["bytes"]))
        yield result
        result["oneClient"] = asyncio.run(one_client(bench, url))
        yield result
        result["manyClients"] = many_clients(bench, url)
        yield result
    result["engineAlone"] = engine_alone(bench)
    yield result


def make_checkpoint(bench: Bench) -> dict[str, Any]:
    """In a process of its own, which leaves nothing on the GPU."""
    command = [sys.executable, "-m", "benchmarks.checkpoint", bench.model, str(bench.checkpoint)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EngineError(f"the checkpoint could not be made: {done.stderr.strip()[-1000:]}")
    made: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    _say(f"a checkpoint of {made['bytes'] / 1e9:.2f} GB, made in {made['seconds']:.1f} s")
    return made


async def one_client(bench: Bench, url: str) -> dict[str, Any]:
    """Seconds per token as a client sees them, and those of the engine's steps meanwhile.

    Between the first and the last text of an answer lie all of its tokens but one; a client that was kept from
    reading the first sees too short a time, which the median of the gaps tells.  An engine's step ends with the
    tokens of the step before; between two steps the engine sends them and reads new requests.
    """
    load = Load(WARM_UPS + REPEATS, 1, PROMPT, ANSWER, vocab_size=bench.vocab_size)
    target = bench.target(url)
    tokens, gaps, steps, first = [], [], [], []
    async with httpx.AsyncClient(timeout=target.seconds) as http:
        for request in plan(load):
            before = steps_of((await http.get(f"{url}/metrics")).text)
            outcome = await ask(http, target, request)
            if outcome.error is not None or outcome.output_tokens != ANSWER:
                raise EngineError(
                    f"a request was answered with {outcome.output_tokens} of {ANSWER} tokens: {outcome.error}"
                )
            await asyncio.sleep(_SETTLE_SECONDS)
            after = steps_of((await http.get(f"{url}/metrics")).text)
            tokens.append((outcome.texts[-1] - outcome.texts[0]) / (ANSWER - 1))
            gaps.append(statistics.median(b - a for a, b in pairwise(outcome.texts)))
            steps.append(most_frequent(steps_between(before, after)).mean)
            first.append(outcome.texts[0] - outcome.began)
    outside = [token - step for token, step in zip(tokens, steps, strict=True)]
    found = {
        "tokenSeconds": spread(tokens[WARM_UPS:]),
        "medianGapSeconds": spread(gaps[WARM_UPS:]),
        "stepSeconds": spread(steps[WARM_UPS:]),
        "outsideStepSeconds": spread(outside[WARM_UPS:]),
        "firstTokenSeconds": spread(first[WARM_UPS:]),
    }
    _say(f"one client: {found['tokenSeconds']['median'] * 1e3:.3f} ms per token")
    return found


def many_clients(bench: Bench, url: str) -> dict[str, Any]:
    """As many clients as the engine has places: rates, latencies, and what the server spent meanwhile."""
    clients = bench.setup.max_num_seqs
    load = Load(bench.setup.requests, clients, PROMPT, ANSWER, vocab_size=bench.vocab_size, seed=1)
    with warm_clients(
        bench.target(url), load, warm_up=clients, processes=bench.processes
    ) as send_load:
        time.sleep(_SETTLE_SECONDS)
        steps, cpu = steps_of(_metrics(url)), cpu_seconds(os.getpid())
        finished = send_load()
    time.sleep(_SETTLE_SECONDS)
    made, spent = steps_between(steps, steps_of(_metrics(url))), cpu_seconds(os.getpid())
    found = summarize(finished.outcomes)
    seconds = found["seconds"]
    _say(f"{clients} clients: {found['outputTokensPerSecond']:.0f} output tokens/s")
    return {
        **found,
        "clients": clients,
        "clientProcesses": bench.processes,
        "clientCpuShare": max(finished.cpu_seconds) / seconds,
        "serverCpuShare": {name: (spent[name] - cpu[name]) / seconds for name in spent},
        "inStepsShare": sum(steps.seconds for steps in made.values()) / seconds,
        "steps": {
            mode: {"count": steps.count, "meanSeconds": steps.mean} for mode, steps in made.items()
        },
    }


def engine_alone(bench: Bench) -> dict[str, Any]:
    """Seconds per token of the same engine without HTTP at batch 1, run by run the mean of its steps."""
    with engine_process(bench.document(), (), bench.checkpoint, bench.cache) as run:
        times = [run(1, PROMPT, ANSWER)[0] for _ in range(WARM_UPS + REPEATS)][WARM_UPS:]
    found = {
        "tokenSeconds": spread([run["decodeMean"] for run in times]),
        "medianStepSeconds": spread([run["decode"] for run in times]),
    }
    _say(f"the engine alone: {found['tokenSeconds']['median'] * 1e3:.3f} ms per token")
    return found


def table(result: dict[str, Any]) -> Iterator[str]:
    """The record as Markdown, as far as it goes."""
    setup, size = result["setup"], result["checkpoint"]["bytes"]
    yield (
        f"On {result['machine']['gpu']}; at most {setup['max_num_seqs']} sequences of up to "
        f"{setup['max_model_len']} tokens and {setup['max_num_batched_tokens']} tokens a step. The checkpoint of "
        f"{size / 1e9:.2f} GB lies in the page cache. A new pod has the compile cache, but nothing that Triton keeps."
    )
    yield ""
    starts = result["starts"]
    yield f"| start, s | {' | '.join(start['configuration'] for start in starts)} |"
    yield f"|---|{'---|' * len(starts)}"
    for label, *cells in phase_rows(starts):
        yield f"| {label} | {' | '.join(cells)} |"
    rates = [spread_text(start["weightsBytesPerSecond"], 1e-9) for start in starts]
    yield f"| weights, GB/s | {' | '.join(rates)} |"
    if "oneClient" in result:
        yield ""
        yield from _one_client(result["oneClient"], result.get("engineAlone"))
    if "manyClients" in result:
        yield ""
        yield from _many_clients(result["manyClients"])


def _one_client(seen: dict[str, Any], alone: dict[str, Any] | None) -> Iterator[str]:
    yield f"| one client, {seen['tokenSeconds']['runs']} answers one after another | ms |"
    yield "|---|---|"
    rows = [
        ("time to first token", seen["firstTokenSeconds"]),
        ("time per token", seen["tokenSeconds"]),
        ("median time between two tokens", seen["medianGapSeconds"]),
        ("inside the engine's step, in the same server", seen["stepSeconds"]),
        ("outside of it", seen["outsideStepSeconds"]),
    ]
    if alone is not None:
        token, step = alone["tokenSeconds"], alone["medianStepSeconds"]
        rows += [
            ("the engine alone: time per token", token),
            ("the engine alone: median step", step),
            (
                "**HTTP, per token**: difference of the times",
                difference(seen["tokenSeconds"], token),
            ),
            ("the same: difference of the medians", difference(seen["medianGapSeconds"], step)),
        ]
    for label, value in rows:
        yield f"| {label} | {spread_text(value, 1e3, 3)} |"


def difference(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Of the medians of two spreads, and the least and the most that it could be."""
    return {
        "median": a["median"] - b["median"],
        "min": a["min"] - b["max"],
        "max": a["max"] - b["min"],
        "runs": min(a["runs"], b["runs"]),
    }


def _many_clients(found: dict[str, Any]) -> Iterator[str]:
    busy = found["serverCpuShare"]
    yield (
        f"{found['clients']} clients: {found['completed']} requests answered, {found['failed']} failed, "
        f"{found['outputTokensPerSecond']:.0f} output tokens/s. The engine was inside its steps for "
        f"{found['inStepsShare']:.0%} of the time; CPUs busy: HTTP process {busy['http']:.2f}, engine "
        f"{busy['engine']:.2f}, the busiest of {found['clientProcesses']} client processes "
        f"{found['clientCpuShare']:.2f}."
    )
    if found["clientCpuShare"] > BUSY_SHARE:
        yield "The clients were the limit: more processes of them might have seen more."
    yield ""
    columns = list(found["latencySeconds"])
    yield f"| {found['clients']} clients, ms | {' | '.join(columns)} |"
    yield f"|---|{'---|' * len(columns)}"
    for label, field in (
        ("time to first token", "ttftSeconds"),
        ("time per token", "tpotSeconds"),
        ("whole answer", "latencySeconds"),
    ):
        yield f"| {label} | {' | '.join(f'{found[field][c] * 1e3:.2f}' for c in columns)} |"
    yield ""
    yield "| steps | number | mean, ms |"
    yield "|---|---|---|"
    for mode, steps in found["steps"].items():
        yield f"| {mode} | {steps['count']:.0f} | {steps['meanSeconds'] * 1e3:.3f} |"


def _told(kind: str, starts: list[dict[str, Any]], size: int) -> dict[str, Any]:
    found = summary(kind, starts)
    rates = [size / start["phases"]["weights"] for start in starts]
    _say(f"{kind}: first token after {found['firstToken']['median']:.1f} s, cache {found['cache']}")
    return {**found, "weightsBytesPerSecond": spread(rates)}


def _metrics(url: str) -> str:
    return httpx.get(f"{url}/metrics", timeout=60).raise_for_status().text


def _say(text: str) -> None:
    print(f"[{time.monotonic() - _STARTED:6.1f} s] {text}", file=sys.stderr, flush=True)


_STARTED = time.monotonic()


def main() -> None:
    """Measure, write the record after every part if asked to, print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SETUPS, default="llama-8b")
    parser.add_argument(
        "--client-processes",
        type=int,
        default=max(1, min(8, len(os.sched_getaffinity(0)) // 2)),
        help="which share the clients",
    )
    parser.add_argument(
        "--warm-starts", type=int, default=2, help="on the same machine, after that of a new pod"
    )
    parser.add_argument("--output", type=Path, help="write the record there")
    options = parser.parse_args()
    # Ended from outside, the server must end too, and the checkpoint must go.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    result: dict[str, Any] = {}
    try:
        with tempfile.TemporaryDirectory(prefix="kerf-serving-") as folder:
            bench = Bench(
                options.model, Path(folder), options.client_processes, options.warm_starts
            )
            for result in record(bench):
                if options.output:
                    options.output.write_text(json.dumps(result, indent=1) + "\n")
    finally:
        if result:
            print("\n".join(table(result)))


if __name__ == "__main__":
    main()
