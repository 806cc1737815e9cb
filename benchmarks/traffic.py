"""Random traffic on one engine: ``python -m benchmarks.traffic [--steps 50000] [--output FILE]``.

Requests of random lengths arrive in bursts and lulls, some are aborted while they wait or run, and the
engine takes one step after another.  What is looked for is what must not happen: a capture or a
compilation after start-up, memory that grows, a step that no counter knows.  The program fails if one
of them is seen.  The model is a small random Llama, so that steps are short and many.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kerf_runtime.cli.bench_record import header
from kerf_runtime.compilation.counters import compilation_counter
from kerf_runtime.engine.args import EngineArgs
from kerf_runtime.engine.core import EngineCore
from kerf_runtime.engine.messages import AddRequest, SamplingParams
from kerf_runtime.engine.scheduler import Batch, Scheduler

MAX_SEQS, MAX_TOKENS, MAX_LEN, VOCABULARY = 32, 256, 256, 512
SIZES = (1, 2, 4, 8, 16, 24, 32, 64, 128)
"""Below the largest batch, so that steps above the largest graph occur too."""
COUNTERS_THAT_MOVE = frozenset({"graph_replays"})
RATES = (0.02, 0.1, 0.3, 1.0, 2.0)
"""Requests per step, one of them at a time."""
RSS_LIMIT = 16 * 2**20
"""Bytes by which the process may grow after its warm-up: Python's own books, not a buffer per step."""


@dataclass
class Traffic:
    """Makes requests and aborts from a seed, and knows what is still running."""

    seed: int = 0
    added: int = 0
    aborted: int = 0
    finished: int = 0
    tokens: int = 0
    live: dict[str, int] = field(default_factory=dict)
    """Request id -> tokens that it still has to get."""

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._rate = RATES[0]

    def before_step(self, core: EngineCore, step: int) -> None:
        """Let requests arrive and go."""
        if step % 500 == 0:
            self._rate = self._random.choice(RATES)
        waiting = len(self.live) - core.engine.scheduler.num_running
        arrivals = int(self._rate) + (self._random.random() < self._rate % 1)
        if waiting < 2 * MAX_SEQS:
            for _ in range(arrivals):
                self._add(core)
        if self.live and self._random.random() < 0.02:
            name = self._random.choice(list(self.live))
            core.abort(name)
            del self.live[name]
            self.aborted += 1
        if not self.live:
            self._add(core)

    def after_step(self, core: EngineCore) -> None:
        """Run the step and book what it gave.

        Raises:
            SystemExit: a request ended after another number of tokens than it should have.
        """
        for output in core.step():
            name = output.request_id
            self.tokens += len(output.token_ids)
            self.live[name] -= len(output.token_ids)
            if (output.finish_reason is not None) is not (self.live[name] == 0):
                raise SystemExit(f"request {name} has {self.live[name]} tokens left at its end")
            if output.finish_reason is not None:
                del self.live[name]
                self.finished += 1

    def _add(self, core: EngineCore) -> None:
        pick = self._random
        length = min(int(2 ** pick.uniform(0, 8)), MAX_LEN - 1)
        most = min(int(2 ** pick.uniform(0, 7)), MAX_LEN - length)
        name = str(self.added)
        options: dict[str, Any] = {}
        if pick.random() < 0.2:
            options = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": pick.randrange(2**31)}
        prompt = [pick.randrange(VOCABULARY) for _ in range(length)]
        params = SamplingParams(max_tokens=most, ignore_eos=True, **options)
        core.add(AddRequest(name, prompt, params, priority=pick.choice((0, 0, 0, -1, 1))))
        self.live[name] = most
        self.added += 1


def memory() -> dict[str, int]:
    """Bytes: of tensors and of PyTorch's cache on the device, and of the process."""
    gpu = torch.cuda.is_available()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "allocated": torch.cuda.memory_allocated() if gpu else 0,
        "reserved": torch.cuda.memory_reserved() if gpu else 0,
        "resident": pages * resource.getpagesize(),
    }


def drive(core: EngineCore, steps: int, seed: int = 0) -> dict[str, Any]:
    """Take ``steps`` steps of random traffic; a call that only reads the tokens of the last one is none.

    Returns:
        What happened: requests, seconds, changed counters, dispatch counts, and the memory after a tenth
        of the steps and then at every tenth.
    """
    traffic = Traffic(seed)
    batches = _count_batches(core.engine.scheduler)
    counters, dispatch = compilation_counter.snapshot(), core.report()["dispatch"]
    samples = []
    started = time.perf_counter()
    while (step := batches.total()) < steps:
        traffic.before_step(core, step)
        traffic.after_step(core)
        if batches.total() > step and batches.total() % max(1, steps // 10) == 0:
            samples.append({"step": batches.total(), **memory()})
    seconds = time.perf_counter() - started
    after, report = compilation_counter.snapshot(), core.report()
    return {
        "steps": steps,
        "seconds": seconds,
        "requests": traffic.added,
        "finished": traffic.finished,
        "aborted": traffic.aborted,
        "preemptions": core.engine.scheduler.preemptions,
        "generatedTokens": traffic.tokens,
        "counters": {k: after[k] - counters[k] for k in after if after[k] != counters[k]},
        "dispatch": {k: n - dispatch[k] for k, n in report["dispatch"].items()},
        "dispatchDetail": report["dispatch_detail"],
        "memory": samples,
    }


def _count_batches(scheduler: Scheduler) -> Counter[str]:
    """Counts what the scheduler gives, apart from the counters of the engine."""
    batches: Counter[str] = Counter()
    schedule = scheduler.schedule

    def counted() -> Batch | None:
        batch = schedule()
        batches["given"] += batch is not None
        return batch

    scheduler.schedule = counted  # type: ignore[method-assign]
    return batches


def violations(result: dict[str, Any]) -> Iterator[str]:
    """What must not have happened and did."""
    moved = set(result["counters"]) - COUNTERS_THAT_MOVE
    if moved:
        yield f"counters moved after start-up: {', '.join(sorted(moved))}"
    accounted = sum(result["dispatch"].values())
    if accounted != result["steps"]:
        yield f"{accounted} of {result['steps']} steps are in the dispatch counters"
    first, last = result["memory"][0], result["memory"][-1]
    if last["reserved"] > first["reserved"]:
        yield f"reserved device memory grew from {first['reserved']} to {last['reserved']} bytes"
    if last["resident"] - first["resident"] > RSS_LIMIT:
        yield f"the process grew from {first['resident']} to {last['resident']} bytes"


def make_checkpoint(folder: Path) -> Path:
    """A Llama of two layers with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCABULARY,
        max_position_embeddings=MAX_LEN,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def start(
    model: Path, cache: Path, *, backend: str = "inductor", mode: str = "FULL_AND_PIECEWISE"
) -> EngineCore:
    """An engine at level 3 with a cache small enough for preemptions."""
    document = {
        "apiVersion": "kerf.dev/v1alpha1",
        "kind": "ModelDeployment",
        "metadata": {"name": "traffic"},
        "spec": {
            "model": {"source": {"pvc": {"claimName": "models"}}},
            "engine": {
                "dtype": "bfloat16" if torch.cuda.is_available() else "float32",
                "maxModelLen": MAX_LEN,
                "maxNumSeqs": MAX_SEQS,
                "maxNumBatchedTokens": MAX_TOKENS,
                "kvCacheMemory": "512Ki" if torch.cuda.is_available() else "1Mi",
            },
            "compilation": {
                "level": 3,
                "backend": backend,
                "cudagraphMode": mode,
                "captureSizes": list(SIZES),
            },
        },
    }
    core = EngineCore(EngineArgs(document, model, cache))
    core.startup()
    return core


def table(record: dict[str, Any]) -> Iterator[str]:
    """The record as Markdown."""
    result = record["result"]
    first, last = result["memory"][0], result["memory"][-1]
    dispatch = ", ".join(f"{n} {mode}" for mode, n in result["dispatch"].items())
    yield (
        f"On {record['machine']['gpu']}, FULL_AND_PIECEWISE: {result['steps']} steps in "
        f"{result['seconds']:.0f} s, {result['requests']} requests ({result['finished']} finished, "
        f"{result['aborted']} aborted, {result['preemptions']} preemptions), "
        f"{result['generatedTokens']} tokens."
    )
    yield ""
    yield "| after start-up | |"
    yield "|---|---|"
    changed = result["counters"]
    for label, name in (
        ("captures", "graphs_captured"),
        ("captures attempted", "captures_after_startup"),
        ("compilations", "backend_compilations"),
        ("traces", "dynamo_traces"),
    ):
        yield f"| {label} | {changed.get(name, 0)} |"
    yield f"| steps by mode | {dispatch} |"
    for label, name in (
        ("tensors on the device", "allocated"),
        ("device memory of PyTorch", "reserved"),
        ("process memory", "resident"),
    ):
        yield (
            f"| {label} after {first['step']} and {last['step']} steps, MiB | "
            f"{first[name] / 2**20:.2f}, {last[name] / 2**20:.2f} |"
        )


def main() -> None:
    """Run, print, write the record if asked to; fail on a violation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50000)
    parser.add_argument("--output", type=Path, help="write the record there")
    parser.add_argument("--backend", default="inductor", help="compiler of the pieces")
    options = parser.parse_args()
    record = header("benchmarks.traffic")
    record["machine"]["gpu"] = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    )
    record["command"] = ["python", "-m", "benchmarks.traffic", "--steps", str(options.steps)]
    record["model"] = "Llama of two layers, random weights, level 3"
    with tempfile.TemporaryDirectory() as folder:
        model = make_checkpoint(Path(folder) / "model")
        core = start(model, Path(folder) / "cache", backend=options.backend)
        record["result"] = drive(core, options.steps)
    print("\n".join(table(record)))
    if options.output:
        options.output.write_text(json.dumps(record, indent=1) + "\n")
    found = list(violations(record["result"]))
    if found:
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
