"""One engine per CUDA-graph mode plays the matrix; each must answer like mode NONE and run as the rules say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.engine.matrix import (
    CAPTURED,
    Played,
    cases,
    dispatch_counts,
    expected_dispatch,
    play,
)
from tests.models.checkpoints import make_bamba, make_llama, make_random
from transformers import OPTConfig, OPTForCausalLM

from kerf_runtime.compilation.counters import compilation_counter
from kerf_runtime.engine.core import EngineCore

HEADS_OF_64 = {"hidden_size": 128, "num_attention_heads": 2}
CASES = tuple(cases())

Compare = Callable[[Played, Played, str], None]
"""Raises if a step's tokens and logits are not those of mode NONE; told where it was."""


def make_opt() -> OPTForCausalLM:
    options: dict[str, Any] = {
        "ffn_dim": 96,
        "num_hidden_layers": 3,
        "vocab_size": 320,
        "max_position_embeddings": 256,
    }
    return make_random(OPTForCausalLM, OPTConfig(**options, **HEADS_OF_64))


def make_tiny_llama() -> Any:
    return make_llama(num_key_value_heads=1, **HEADS_OF_64)


def make_hybrid() -> Any:
    return make_bamba(
        num_hidden_layers=3,
        attn_layer_indices=[1],
        num_key_value_heads=1,
        mamba_n_heads=4,
        **HEADS_OF_64,
    )


FAMILIES = {"Llama": make_tiny_llama, "OPT": make_opt, "Bamba": make_hybrid}


def play_reference(core: EngineCore) -> list[list[Played]]:
    """Every case on an engine in mode NONE."""
    return [play(core, case) for case in CASES]


def check_mode(
    core: EngineCore, mode: str, references: list[list[Played]], compare: Compare
) -> None:
    """Play every case; compare each step, the dispatch counters and what steps may count."""
    report = core.report()
    assert report["effective"]["mode"] == mode
    assert report["graphs"]["captured"] == CAPTURED[mode]
    before = compilation_counter.snapshot()
    steps: Counter[Any] = Counter()
    for case, reference in zip(CASES, references, strict=True):
        for step, got, expected in zip(
            case.steps, play(core, case, reference), reference, strict=True
        ):
            steps[expected_dispatch(mode, step.tokens, step.uniform)] += 1
            compare(got, expected, f"{case.name}, {step.tokens} tokens")
    assert dispatch_counts(core.report()) == steps
    after = compilation_counter.snapshot()
    changed = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert changed == _replays(steps, report["compiled"]["capturable"])


def _replays(steps: Counter[Any], pieces: int) -> dict[str, int]:
    """The counters that steps may change: one replay for a full graph, one for each piece."""
    per_step = {"FULL": 1, "PIECEWISE": pieces, "NONE": 0}
    count = sum(number * per_step[mode] for (mode, _, _), number in steps.items())
    return {"graph_replays": count} if count else {}


def relative_error(got: Played, expected: Played) -> float:
    """Largest distance of the logits of a sequence, relative to their norm."""
    distances = (got.logits - expected.logits).norm(dim=-1) / expected.logits.norm(dim=-1)
    return float(distances.max())
