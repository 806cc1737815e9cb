"""Which graph, if any, runs a batch.  Pure, no torch.

The dispatcher knows the captured keys of each mode and answers in this order: exact FULL, FULL with
the non-uniform key, PIECEWISE with the non-uniform key, NONE.  Every answer is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kerf_runtime.config.compilation import CUDAGraphMode
from kerf_runtime.cudagraph.descriptor import BatchDescriptor, DispatchDecision, GraphKey
from kerf_runtime.cudagraph.sizes import PaddedSizes
from kerf_runtime.reasons import DispatchReason
from kerf_runtime.stats import NO_SIZE

__all__ = ["Batch", "Dispatcher", "capture_plan"]

Batch = tuple[int, bool]
"""Real tokens, and whether every sequence adds exactly one."""
Answered = tuple[CUDAGraphMode, int, DispatchReason]
"""Mode, captured size and reason of a decision."""


def capture_plan(mode: CUDAGraphMode, sizes: tuple[int, ...], max_num_seqs: int) -> list[GraphKey]:
    """What to capture for ``mode``, largest first, mixed batches before uniform decode ones.

    A uniform decode batch has at most ``max_num_seqs`` tokens, so decode graphs stop at the smallest
    size that holds them.
    """
    plan = []
    ordered = sorted(sizes, reverse=True)
    if mode.mixed_mode() is not CUDAGraphMode.NONE:
        plan += [(mode.mixed_mode(), BatchDescriptor(size, False)) for size in ordered]
    if mode.decode_mode() is CUDAGraphMode.FULL:
        top = min((size for size in sizes if size >= max_num_seqs), default=max(sizes, default=0))
        plan += [
            (CUDAGraphMode.FULL, BatchDescriptor(size, True)) for size in ordered if size <= top
        ]
    return plan


class _Answer:
    """A decision and how often it was given: a step must not pay for making and hashing one."""

    __slots__ = ("count", "decision")

    def __init__(self, decision: DispatchDecision) -> None:
        self.decision = decision
        self.count = 0


class Dispatcher:
    """Chooses mode and padded size of each step.

    Args:
        mode: the effective CUDA-graph mode.
        captured: every (mode, descriptor) that has been captured.
    """

    def __init__(self, mode: CUDAGraphMode, captured: Iterable[GraphKey]) -> None:
        self._answers: dict[Batch, _Answer] = {}
        self._past: Counter[Answered] = Counter()
        self._batches: Counter[Batch] = Counter()
        self.use(captured, mode)

    def use(self, captured: Iterable[GraphKey], mode: CUDAGraphMode) -> None:
        """Answer with these graphs in this mode from now on; what was counted stays counted."""
        self.mode = mode
        self._past, self._batches = self.counts, self.batches
        self._answers = {}
        keys = frozenset(captured)
        self._sizes = {
            (mode, uniform): PaddedSizes(
                tuple(d.num_tokens for m, d in keys if m is mode and d.uniform_decode is uniform)
            )
            for mode in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE)
            for uniform in (True, False)
        }

    def dispatch(self, num_tokens: int, uniform_decode: bool) -> DispatchDecision:
        """How to run a batch of ``num_tokens`` real tokens; counts the decision."""
        answer = self._answers.get((num_tokens, uniform_decode))
        if answer is None:
            answer = _Answer(self._decide(num_tokens, uniform_decode))
            self._answers[num_tokens, uniform_decode] = answer
        answer.count += 1
        return answer.decision

    @property
    def batches(self) -> Counter[Batch]:
        """Batches by real tokens and whether they were uniform decode batches."""
        batches = Counter(self._batches)
        batches.update({batch: answer.count for batch, answer in self._answers.items()})
        return batches

    @property
    def counts(self) -> Counter[Answered]:
        """Decisions by mode, captured size (``NO_SIZE`` in mode NONE) and reason."""
        counts = Counter(self._past)
        for answer in self._answers.values():
            decision = answer.decision
            without = decision.mode is CUDAGraphMode.NONE
            size = NO_SIZE if without else decision.descriptor.num_tokens
            counts[decision.mode, size, decision.reason] += answer.count
        return counts

    def _decide(self, num_tokens: int, uniform_decode: bool) -> DispatchDecision:
        wanted = self.mode.decode_mode() if uniform_decode else self.mode.mixed_mode()
        bare = BatchDescriptor(num_tokens, uniform_decode)
        if wanted is CUDAGraphMode.NONE:
            return DispatchDecision(CUDAGraphMode.NONE, bare, DispatchReason.MODE_NONE)
        candidates = (
            (CUDAGraphMode.FULL, uniform_decode),
            (CUDAGraphMode.FULL, False),
            (CUDAGraphMode.PIECEWISE, False),
        )
        any_graph = False
        for mode, uniform in candidates:
            table = self._sizes[mode, uniform]
            any_graph = any_graph or table.largest > 0
            size = table.padded(num_tokens)
            if size is not None:
                reason = DispatchReason.EXACT if size == num_tokens else DispatchReason.PADDED
                return DispatchDecision(mode, BatchDescriptor(size, uniform), reason)
        reason = DispatchReason.ABOVE_LARGEST if any_graph else DispatchReason.NO_GRAPH
        return DispatchDecision(CUDAGraphMode.NONE, bare, reason)

    def totals(self) -> dict[str, int]:
        """Steps per mode."""
        totals = {
            mode.value: 0
            for mode in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE)
        }
        for (mode, _, _), count in self.counts.items():
            totals[mode.value] += count
        return totals

    def detail(self) -> list[dict[str, object]]:
        """Steps per mode, captured size and reason, in a stable order."""
        return [
            {"mode": mode.value, "size": size, "reason": reason.value, "count": count}
            for (mode, size, reason), count in sorted(self.counts.items())
        ]
