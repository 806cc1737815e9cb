"""Tensors of every stored data type in a file of their own, for tests of how they are read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

from kerf_runtime.models.checkpoint import find_checkpoint
from kerf_runtime.models.sources import WeightSource, open_source

PART_BYTES = 1000
"""So few that the large one is read in many parts."""

TENSORS = {
    "large": torch.randn(321, 17),
    "half": torch.randn(5, 300).half(),
    "brain": torch.randn(7, 11, 3).bfloat16(),
    "eight": torch.randn(64, 33).to(torch.float8_e4m3fn),
    "one": torch.tensor(3.5),
    "nothing": torch.empty(0, 4),
}


@contextmanager
def stored_tensors(folder: Path) -> Iterator[WeightSource]:
    """All of them, written to ``folder`` and opened."""
    save_file(TENSORS, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    with open_source(find_checkpoint(folder)) as opened:
        yield opened
