"""What every family must show: the answers of transformers, and layers that are one program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.compilation.graphs import ATTENTION, trace_and_split
from tests.models.checkpoints import our_logits, reference_logits

from kerf_runtime.compilation.fingerprint import fingerprint_piece
from kerf_runtime.models import LoadedModel, load_model

IDS = [(7 * i * i + 3) % 320 for i in range(90)]
STEPS = 12


def load(path: Path, **options: Any) -> LoadedModel:
    """The checkpoint in float32 on the CPU."""
    return load_model(path, dtype=torch.float32, device="cpu", **options)


def assert_parity(path: Path, model: Any, **options: Any) -> None:
    """Logits of every position of a prompt are close, with identical best tokens, and so is a greedy answer."""
    loaded = load(path, **options)
    logits, expected = our_logits(loaded, IDS), reference_logits(model, IDS)
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)
    best = logits.argmax(-1)
    assert torch.equal(best, expected.argmax(-1))
    assert len(set(best.tolist())) > 1
    ours, theirs = IDS[:20], IDS[:20]
    for _ in range(STEPS):
        ours = [*ours, int(our_logits(loaded, ours)[-1].argmax())]
        theirs = [*theirs, int(reference_logits(model, theirs)[-1].argmax())]
    assert ours == theirs


def pieces(path: Path, **options: Any) -> tuple[int, int]:
    """How many pieces the traced and cut model has, and how many different programs to compile."""
    loaded = load(path, **options)
    _, split = trace_and_split(loaded.model, (*ATTENTION, *loaded.config.mixer_ops))
    programs = [fingerprint_piece(piece.module) for piece in split.compilable]
    return len(split.pieces), len(set(programs))


def expected_pieces(layers: int) -> tuple[int, int]:
    """Of a model of ``layers`` layers that are all the same: 2N+1 and min(N+1, 3)."""
    return 2 * layers + 1, min(layers + 1, 3)
