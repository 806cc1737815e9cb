"""Tensors that keep their place on the device while the CPU writes the next step's values.

What is sent to a GPU lies in pinned memory until it has been copied, which waits for all steps before.  So there
are two such places, used in turn, and whoever wants to fill one waits until it was copied: Python is two steps
ahead of the device at most.  On a CPU the arrays and the tensors are the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

__all__ = ["BlockTable", "Inputs", "StepInputs"]

_Array = np.ndarray[Any, Any]
_T = TypeVar("_T")

_ALIGNMENT = 256
"""Of every tensor, in bytes: that of memory by itself, which kernels may count on."""


@dataclass(frozen=True)
class Inputs(Generic[_T]):
    """What a step tells the device, beside the block table: at most T tokens of S sequences.

    Attributes:
        input_ids: int64 [T].
        positions: int64 [T], of the tokens in their sequences.
        slots: int64 [T], where keys and values go; -1 for nowhere.
        query_start: int32 [S + 1], where in the batch each sequence begins, and where the last one ends.
        seq_lens: int32 [S], tokens of each sequence with those of this step.
        state_slots: int64 [S], where the states of state-space layers are.
        last: int64 [S], tokens of the batch whose hidden states are sampled from.
        fed_places: int64 [S], where in the batch a pending token belongs.
        fed_rows: int64 [S], which of the tokens of the step before it is.
    """

    input_ids: _T
    positions: _T
    slots: _T
    query_start: _T
    seq_lens: _T
    state_slots: _T
    last: _T
    fed_places: _T
    fed_rows: _T


class _Places:
    """Where the CPU writes what a tensor shall hold: two pinned places in turn, or the tensor itself.

    Args:
        tensor: on the device.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.on_cpu = tensor.device.type == "cpu"
        self.all = [tensor]
        self._copied: list[torch.cuda.Event] = []
        if not self.on_cpu:
            self.all = [
                torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=True) for _ in range(2)
            ]
            self._copied = [torch.cuda.Event() for _ in self.all]
        self.turned = 0
        """Index of the place that is written now."""

    def turn(self) -> None:
        """Go on to the other place, once what it held has been copied."""
        if not self.on_cpu:
            self.turned = 1 - self.turned
            self._copied[self.turned].synchronize()

    def send(self, rows: slice) -> None:
        """Have these rows copied to the device."""
        if not self.on_cpu:
            self._tensor[rows].copy_(self.all[self.turned][rows], non_blocking=True)
            self._copied[self.turned].record()


class StepInputs:
    """All inputs in one piece of memory, so that one copy sends them.

    Args:
        tokens: T, most of a step.
        sequences: S, most of a step.
        device: where they are needed.
    """

    def __init__(self, tokens: int, sequences: int, *, device: torch.device) -> None:
        sizes = dict.fromkeys(Inputs.__annotations__, (sequences, torch.int64))
        sizes |= dict.fromkeys(("input_ids", "positions", "slots"), (tokens, torch.int64))
        sizes |= {
            "query_start": (sequences + 1, torch.int32),
            "seq_lens": (sequences, torch.int32),
        }
        length = sum(_aligned(size * dtype.itemsize) for size, dtype in sizes.values())
        memory = torch.zeros(length, dtype=torch.uint8, device=device)
        self.device = _cut(memory, sizes, lambda tensor: tensor)
        """On the device; keep their addresses."""
        self._places = _Places(memory)
        self._arrays: list[Inputs[_Array]] = [
            _cut(place, sizes, lambda tensor: tensor.numpy()) for place in self._places.all
        ]

    @property
    def host(self) -> Inputs[_Array]:
        """Where the CPU writes."""
        return self._arrays[self._places.turned]

    def turn(self) -> None:
        """Begin a step: write to a place that no step before needs any more."""
        self._places.turn()

    def send(self) -> None:
        """Bring what the CPU wrote to the device."""
        self._places.send(slice(None))


class BlockTable:
    """The cache blocks of every sequence of a step; only rows that changed are written and sent.

    Args:
        sequences: rows.
        columns: most blocks of a sequence.
        device: where the table is needed.
    """

    def __init__(self, sequences: int, columns: int, *, device: torch.device) -> None:
        self.device = torch.zeros(sequences, columns, dtype=torch.int32, device=device)
        """On the device; keeps its address."""
        self._places = _Places(self.device)
        self._arrays = [place.numpy() for place in self._places.all]
        self.host: _Array = np.zeros((sequences, columns), dtype=np.int32)
        """As the device has it, or will once it is sent."""
        if self._places.on_cpu:
            self.host = self._arrays[0]
        self._rows: list[tuple[list[int], int] | None] = [None] * sequences
        """Per row: the request's list of blocks that is written there, and how many."""
        self._stale = range(0)
        """Rows that the device does not have yet, and what lies between them."""

    def write(self, row: int, blocks: list[int]) -> None:
        """Bring a row up to date.

        Args:
            row: whose.
            blocks: a request's list, which is replaced or grows, no more.
        """
        written = self._rows[row]
        known = written[1] if written is not None and written[0] is blocks else 0
        if known == len(blocks):
            return
        self.host[row, known : len(blocks)] = blocks[known:]
        self._rows[row] = (blocks, len(blocks))
        self._stale = _around(self._stale, range(row, row + 1))

    def clear(self) -> None:
        """Have every sequence read block 0."""
        self.host[:] = 0
        self._rows = [None] * len(self._rows)
        self._stale = range(len(self._rows))

    def send(self) -> range:
        """Bring the rows that changed to the device; returns which were sent, those between included."""
        sent, self._stale = self._stale, range(0)
        if sent and not self._places.on_cpu:
            rows = slice(sent.start, sent.stop)
            self._places.turn()
            self._arrays[self._places.turned][rows] = self.host[rows]
            self._places.send(rows)
        return sent


def _cut(
    memory: Tensor,
    sizes: Mapping[str, tuple[int, torch.dtype]],
    finish: Callable[[Tensor], _T],
) -> Inputs[_T]:
    parts, first = {}, 0
    for name, (size, dtype) in sizes.items():
        part = memory[first : first + size * dtype.itemsize].view(dtype)
        parts[name] = finish(part)
        first += _aligned(part.nbytes)
    return Inputs(**parts)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _around(first: range, second: range) -> range:
    """The smallest range with both."""
    if not first:
        return second
    return range(min(first.start, second.start), max(first.stop, second.stop))
