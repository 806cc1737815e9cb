"""Continuous batching: which requests run in the next step, and with how many tokens.  Pure, no torch.

Every step takes up to ``max_num_batched_tokens`` tokens from up to ``max_num_seqs`` requests:

1. every decoding request gets one token, so that a long prompt never stalls running answers;
2. what is left of the budget goes to prompts that are partly computed, oldest first (chunked prefill);
3. then to waiting requests, in order of arrival, none overtaking another.

A request gets the blocks for all its known tokens when it is admitted, so a prompt never stops half
way; only decoding grows.  When no block is free, the youngest running request gives back all its blocks
and waits at the front of the queue; its tokens are computed again later.  Running requests are always
older than waiting ones, and the oldest can always run, so every request finishes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kerf_runtime.engine.blocks import BlockPool
from kerf_runtime.engine.messages import SamplingParams, TokenOutput
from kerf_runtime.engine.request import Request, RequestState
from kerf_runtime.errors import RequestError

__all__ = ["Batch", "Scheduled", "Scheduler", "SchedulerLimits"]


@dataclass(frozen=True)
class SchedulerLimits:
    """What a step and a request may be.

    Attributes:
        max_num_seqs: requests in one step.
        max_num_batched_tokens: tokens in one step; at least ``max_num_seqs``.
        max_model_len: tokens of one request, prompt and answer together.
        vocab_size: token ids are below it.
        block_size: tokens per cache block.
        num_blocks: cache blocks; enough for one request of ``max_model_len`` tokens.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int


@dataclass(frozen=True)
class Scheduled:
    """The part of a request that runs in one step: tokens ``start`` to ``start + count``.

    ``samples`` is True if the last of them is the request's last known token, so that the step
    yields a new one.
    """

    request: Request
    start: int
    count: int
    samples: bool


@dataclass(frozen=True)
class Batch:
    """One step.  ``uniform_decode`` is True if every request contributes exactly one token."""

    items: tuple[Scheduled, ...]
    num_tokens: int
    uniform_decode: bool
    first_time: tuple[Request, ...]
    """Requests that run for the first time."""


class Scheduler:
    """Holds all live requests; ``schedule`` and ``complete`` alternate."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks, limits.block_size)
        self.preemptions = 0
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        """Oldest first."""

    @property
    def num_running(self) -> int:
        """Requests that hold cache blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their first step, or again after a preemption."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether ``schedule`` would return a batch."""
        return bool(self._requests)

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        eos_token_ids: Sequence[int],
        seed: int,
        arrived: float,
    ) -> Request:
        """Queue a request.

        Raises:
            RequestError: it can never run, or its id is in use; names the parameter.
        """
        self._check(request_id, prompt, params)
        stop_ids = frozenset(params.stop_token_ids)
        request = Request(
            request_id=request_id,
            tokens=list(prompt),
            prompt_length=len(prompt),
            params=params,
            stop_ids=stop_ids if params.ignore_eos else stop_ids | frozenset(eos_token_ids),
            seed=seed,
            arrived=arrived,
        )
        self._requests[request_id] = request
        self._waiting.append(request)
        return request

    def _check(self, request_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        limits = self.limits
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is already in use", where="request_id")
        if not prompt:
            raise RequestError("the prompt is empty", where="prompt")
        if len(prompt) >= limits.max_model_len:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, which leaves no room for an answer within "
                f"maxModelLen {limits.max_model_len}",
                where="prompt",
                hint="Shorten the prompt or raise engine.maxModelLen",
            )
        if params.max_tokens < 1:
            raise RequestError(f"max_tokens is {params.max_tokens}, below 1", where="max_tokens")
        longest = min(len(prompt) + params.max_tokens, limits.max_model_len)
        if self.pool.blocks_for(longest) > self.pool.total:
            raise RequestError(
                f"{longest} tokens need {self.pool.blocks_for(longest)} KV-cache blocks, and there "
                f"are {self.pool.total}",
                where="max_tokens",
                hint="Lower max_tokens or raise engine.kvCacheMemory",
            )
        bad = next((token for token in prompt if not 0 <= token < limits.vocab_size), None)
        if bad is not None:
            raise RequestError(
                f"token id {bad} is not in the vocabulary of {limits.vocab_size} tokens",
                where="prompt",
            )

    def abort(self, request_id: str) -> bool:
        """Forget a request and free its blocks; False if it is unknown (it may just have finished)."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        if request.state is RequestState.WAITING:
            self._waiting.remove(request)
        else:
            self._running.remove(request)
        self._finish(request)
        return True

    def schedule(self) -> Batch | None:
        """The next step, or None if there is nothing to do."""
        if not self._requests:
            return None
        preemptions_before = self.preemptions
        items = self._schedule_decodes()
        budget = self.limits.max_num_batched_tokens - len(items)
        for request in self._running:
            if budget and request.remaining > 1:
                budget -= self._take(items, request, budget)
        first_time: list[Request] = []
        # Nobody is admitted in a step that took blocks away: the next step would do it again.
        if self.preemptions == preemptions_before:
            self._admit(items, budget, first_time)
        return Batch(
            items=tuple(items),
            num_tokens=sum(item.count for item in items),
            uniform_decode=all(item.count == 1 for item in items),
            first_time=tuple(first_time),
        )

    def _schedule_decodes(self) -> list[Scheduled]:
        items: list[Scheduled] = []
        for request in tuple(self._running):
            # An older request may have preempted this one a moment ago.
            if (
                request.state is RequestState.RUNNING
                and request.remaining == 1
                and self._grow(request)
            ):
                self._take(items, request, 1)
        return items

    def _grow(self, request: Request) -> bool:
        """Make sure there is a block for the next token; False if the request lost its own instead."""
        if self.pool.blocks_for(request.computed + 1) <= len(request.blocks):
            return True
        while not self.pool.free:
            victim = self._running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        request.blocks.extend(self.pool.take(1))
        return True

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self.pool.give_back(request.blocks)
        request.blocks = []
        request.computed = 0
        request.state = RequestState.WAITING
        self._waiting.appendleft(request)
        self.preemptions += 1

    def _admit(self, items: list[Scheduled], budget: int, first_time: list[Request]) -> None:
        while budget and self._waiting and len(self._running) < self.limits.max_num_seqs:
            request = self._waiting[0]
            needed = self.pool.blocks_for(len(request.tokens))
            # One block stays free for each running request, so that admitting does not preempt.
            if needed + len(self._running) > self.pool.free:
                return
            self._waiting.popleft()
            request.blocks = self.pool.take(needed)
            request.state = RequestState.RUNNING
            self._running.append(request)
            if not request.was_scheduled:
                request.was_scheduled = True
                first_time.append(request)
            budget -= self._take(items, request, budget)

    @staticmethod
    def _take(items: list[Scheduled], request: Request, budget: int) -> int:
        count = min(request.remaining, budget)
        items.append(Scheduled(request, request.computed, count, count == request.remaining))
        return count

    def complete(self, batch: Batch, sampled: Sequence[int]) -> list[TokenOutput]:
        """Record a step that has run.

        Args:
            batch: from ``schedule``.
            sampled: one token for every item that samples, in order.

        Returns:
            What is new, one entry per request that got a token.
        """
        outputs = []
        tokens = iter(sampled)
        for item in batch.items:
            token = next(tokens) if item.samples else None
            request = item.request
            if request.state is not RequestState.RUNNING:
                continue  # aborted since
            request.computed = item.start + item.count
            if token is None:
                continue
            reason = request.append(token, self.limits.max_model_len)
            outputs.append(TokenOutput(request.request_id, [token], reason))
            if reason is not None:
                self._running.remove(request)
                self._finish(request)
        return outputs

    def _finish(self, request: Request) -> None:
        del self._requests[request.request_id]
        self.pool.give_back(request.blocks)
        request.blocks = []
        request.state = RequestState.FINISHED
