"""Log probabilities of a prompt's own tokens, for requests whose answers begin with their prompt.

The hidden state of a token predicts the next token.  A prompt is computed in chunks, so what they tell is
put together until the chunk that yields the first token of the answer.  Such requests find nothing in the
prefix cache: what is not computed predicts nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kerf_runtime.engine.logprobs import Logprobs, logprobs_of
from kerf_runtime.engine.messages import TokenLogprobs
from kerf_runtime.engine.request import Request
from kerf_runtime.engine.sample_row import SampleRow
from kerf_runtime.engine.scheduler import Batch, Scheduled
from kerf_runtime.engine.transfer import send

__all__ = ["PromptLogprobs", "PromptReading"]

_ROWS = 128
"""Rows of logits at a time: those of a whole chunk with a large vocabulary would take gigabytes."""


@dataclass
class PromptReading:
    """What is being computed about one prompt.

    Attributes:
        length: tokens of the prompt.
        parts: the token that the first row of a part is about, and its rows.
    """

    length: int
    parts: list[tuple[int, Logprobs]] = field(default_factory=list)

    def read(self) -> list[TokenLogprobs | None]:
        """An entry per token, None for the first; waits for the device."""
        entries: list[TokenLogprobs | None] = [None] * self.length
        for first, part in self.parts:
            for row, entry in part.read().items():
                entries[first + row] = entry
        return entries


class PromptLogprobs:
    """Collects them over the chunks of prompts.

    Args:
        compute_logits: [R, E] -> [R, vocab].
    """

    def __init__(self, compute_logits: Callable[[Tensor], Tensor]) -> None:
        self._compute_logits = compute_logits
        self._readings: WeakKeyDictionary[Request, PromptReading] = WeakKeyDictionary()
        """Of prompts that are partly computed; gone with the request."""

    def collect(self, batch: Batch, hidden: Tensor) -> dict[str, PromptReading]:
        """Enqueue what a step tells about prompts; nothing waits for the device.

        Args:
            batch: that ran.
            hidden: [T, E], its hidden states, padding included.

        Returns:
            By request id, the prompts that this step completes.
        """
        complete: dict[str, PromptReading] = {}
        at = 0
        for item in batch.items:
            request = item.request
            # A request that was preempted after its first token has told everything.
            if request.params.prompt_logprobs and item.start < request.prompt_length:
                if request.generated == 0:
                    self._read(item, hidden[at : at + item.count])
                if item.samples and request in self._readings:
                    complete[request.request_id] = self._readings.pop(request)
            at += item.count
        return complete

    def _read(self, item: Scheduled, hidden: Tensor) -> None:
        """The rows of one item: each is about the token after its own, if that is one of the prompt."""
        request = item.request
        if item.start == 0:  # or again, after a preemption
            self._readings[request] = PromptReading(request.prompt_length)
        reading = self._readings[request]
        last = min(item.start + item.count, request.prompt_length - 1)
        for start in range(item.start, last, _ROWS):
            count = min(_ROWS, last - start)
            logits = self._compute_logits(hidden[start - item.start : start - item.start + count])
            tokens = send(request.tokens[start + 1 : start + 1 + count], torch.int64, logits)
            rows = [SampleRow(request.params, 0, 0)] * count
            found = logprobs_of(logits, rows, tokens)
            if found is not None:
                reading.parts.append((start + 1, found))
