"""The matrix of CUDA-graph modes: batches of chosen sizes and kinds, and what the spec says of each step.

A case is played on an engine's own parts, so that every step is one that a server could run.  Which mode
and size a step must get is computed here from the rules and the list of sizes, not by the dispatcher.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kerf_runtime.engine.core import EngineCore
from kerf_runtime.engine.messages import AddRequest, SamplingParams

SIZES = (1, 2, 4, 8, 16, 32, 64, 96)
LARGEST = SIZES[-1]
BATCHES = (1, 2, 3, 7, 8, 9, 63, 64, LARGEST - 1, LARGEST, LARGEST + 1)
ENGINE = {"maxNumSeqs": LARGEST + 2, "maxNumBatchedTokens": 256, "maxModelLen": 128}
"""More sequences than the largest graph holds, so that decode batches above it occur."""

PARTS = {
    "NONE": ("NONE", "NONE"),
    "PIECEWISE": ("PIECEWISE", "PIECEWISE"),
    "FULL": ("FULL", "FULL"),
    "FULL_DECODE_ONLY": ("FULL", "NONE"),
    "FULL_AND_PIECEWISE": ("FULL", "PIECEWISE"),
}
"""Mode -> what decode batches and what mixed batches run as."""

CAPTURED = {
    "NONE": 0,
    "PIECEWISE": len(SIZES),
    "FULL": 2 * len(SIZES),
    "FULL_DECODE_ONLY": len(SIZES),
    "FULL_AND_PIECEWISE": 2 * len(SIZES),
}

Dispatched = tuple[str, int, str]
"""Mode, captured size (0 without a graph), reason."""


def expected_dispatch(
    mode: str, tokens: int, uniform: bool, sizes: Sequence[int] = SIZES
) -> Dispatched:
    """What a step of ``tokens`` must run as; ``uniform`` if every sequence adds exactly one token."""
    part = PARTS[mode][0 if uniform else 1]
    if part == "NONE":
        return "NONE", 0, "ModeNone"
    fitting = [size for size in sizes if size >= tokens]
    if not fitting:
        return "NONE", 0, "AboveLargest"
    size = min(fitting)
    return part, size, "Exact" if size == tokens else "Padded"


def dispatch_counts(report: dict[str, Any]) -> Counter[Dispatched]:
    """The dispatch counters of ``/debug/graphs``."""
    rows = report["dispatch_detail"]
    return Counter({(row["mode"], row["size"], row["reason"]): row["count"] for row in rows})


@dataclass(frozen=True)
class Step:
    """Prompts that arrive before a step, and the tokens of each sequence in it."""

    arrivals: tuple[tuple[int, ...], ...]
    counts: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.counts)

    @property
    def uniform(self) -> bool:
        return set(self.counts) == {1}


@dataclass(frozen=True)
class Case:
    """A sequence of steps from an idle engine."""

    name: str
    steps: tuple[Step, ...]


class _Prompts:
    """Makes prompts of which no two begin alike, so that none finds its beginning in the KV cache."""

    def __init__(self) -> None:
        self._made = 0

    def of(self, lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        return tuple(self._next(length) for length in lengths)

    def running(self, lengths: Sequence[int]) -> Step:
        """Prompts of these lengths, all computed in one step."""
        return Step(self.of(lengths), tuple(lengths))

    def _next(self, length: int) -> tuple[int, ...]:
        self._made += 1
        beginning = divmod(self._made, 320)
        return (beginning + tuple((5 * place + 3) % 320 for place in range(2, length)))[:length]


def cases() -> Iterator[Case]:
    """Every batch size as decode, as prefill, and as mixed."""
    prompts = _Prompts()
    for tokens in BATCHES:
        short = [1 + (row + 1) % 3 for row in range(tokens)]
        decode = Step((), (1,) * tokens)
        yield Case(f"decode {tokens}", (prompts.running(short), decode, decode))
        yield Case(f"prefill {tokens}", (prompts.running([tokens]),))
        if tokens >= 6:
            parts = [tokens // 3, 1, tokens - 1 - tokens // 3]
            yield Case(f"prefill {tokens} in three", (prompts.running(parts), Step((), (1, 1, 1))))
        if tokens >= 3:  # one token more to decode and at least two of a prompt
            decoding = (tokens - 1) // 2
            prompt = tokens - decoding
            yield Case(
                f"mixed {tokens}",
                (
                    prompts.running(short[:decoding]),
                    Step(prompts.of([prompt]), (*(1,) * decoding, prompt)),
                    Step((), (1,) * (decoding + 1)),
                ),
            )


@dataclass(frozen=True)
class Played:
    """What one step gave: the sampled tokens and the logits that they came from, on the CPU."""

    tokens: list[int]
    logits: Tensor


@torch.inference_mode()
def play(core: EngineCore, case: Case, forced: Sequence[Played] = ()) -> list[Played]:
    """Run a case on an idle engine, and leave it idle.

    Args:
        forced: of an earlier run; its tokens are what the sequences go on with, so that one different
            token does not make every later step another one.
    """
    engine, played = core.engine, []
    names: list[str] = []
    for index, step in enumerate(case.steps):
        for prompt in step.arrivals:
            names.append(f"{case.name} {len(names)}")
            params = SamplingParams(max_tokens=20, ignore_eos=True)
            core.add(AddRequest(names[-1], list(prompt), params))
        batch = engine.scheduler.schedule()
        assert batch is not None
        assert tuple(item.count for item in batch.items) == step.counts, case.name
        decision = engine.graphs.dispatch(batch.num_tokens, batch.uniform_decode)
        output = engine.graphs.run(decision, *engine.runner.prepare(batch, decision))
        tokens = engine.runner.sample(batch, output).read().tokens
        last = [sum(step.counts[: row + 1]) - 1 for row in range(len(step.counts))]
        logits = engine.prepared.model.compute_logits(output.hidden[last])  # type: ignore[operator]
        played.append(Played(tokens, logits.float().cpu()))
        engine.scheduler.complete(batch, forced[index].tokens if forced else tokens)
    for name in names:
        core.abort(name)
    assert not core.has_work
    return played
