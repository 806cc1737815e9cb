"""Tensors that keep their place on the device while the CPU writes the next step's values."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["StepBuffer"]

_Array = np.ndarray[Any, Any]


class StepBuffer:
    """A tensor on the device and the array that the CPU fills; on the CPU both are the same memory.

    What is sent to a GPU lies in pinned memory until it has been copied, and the step before may still
    wait for that.  So there are two such places, used in turn: whoever fills one has read the tokens of
    the step that used it last.

    Args:
        shape: rows first.
        dtype: of the values.
        device: where they are needed.
        keeps: whether ``host`` keeps what was written for steps before, so that only changes are written.
    """

    def __init__(
        self, *shape: int, dtype: torch.dtype, device: torch.device, keeps: bool = False
    ) -> None:
        self.device = torch.zeros(*shape, dtype=dtype, device=device)
        self._on_cpu = device.type == "cpu"
        places = (
            [self.device]
            if self._on_cpu
            else [torch.zeros(*shape, dtype=dtype, pin_memory=True) for _ in range(2)]
        )
        self._places = [(place, place.numpy()) for place in places]
        self._turn = 0
        self._kept: _Array | None = None
        if keeps and not self._on_cpu:
            self._kept = np.zeros_like(self._places[0][1])

    @property
    def host(self) -> _Array:
        """Where the CPU writes."""
        return self._places[self._turn][1] if self._kept is None else self._kept

    def turn(self) -> None:
        """Begin a step: write to the place that the step before does not use."""
        self._turn = (self._turn + 1) % len(self._places)

    def view(self, rows: int, first: int = 0, last: int | None = None) -> Tensor:
        """The first ``rows`` rows on the device, after what the CPU wrote there has been sent.

        Args:
            rows: of the result.
            first: the first row that is sent.
            last: one past the last row that is sent; ``rows`` if None.
        """
        sent = slice(first, rows if last is None else last)
        if not self._on_cpu and sent.stop > sent.start:
            place, array = self._places[self._turn]
            if self._kept is not None:
                array[sent] = self._kept[sent]
            self.device[sent].copy_(place[sent], non_blocking=True)
        return self.device[:rows]
