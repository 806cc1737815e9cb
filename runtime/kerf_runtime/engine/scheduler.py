"""Continuous batching: which requests run in the next step, and with how many tokens.  Pure, no torch.

Every step takes up to ``max_num_batched_tokens`` tokens from up to ``max_num_seqs`` requests:

1. every decoding request gets one token, so that a long prompt never stalls running answers;
2. what is left of the budget goes to prompts that are partly computed, in order (chunked prefill);
3. then to waiting requests, in order, none overtaking another.

The order is that of ``fair_queue``: arrival, moved by priority.  It never changes, and only finitely many
later arrivals come before a request.  The first of all live requests keeps its blocks once it runs; while
it waits nobody else is admitted, and what runs comes to an end.  So every request finishes.

A request gets the blocks for all its known tokens when it is admitted, so a prompt never stops half
way; only decoding grows.  Leading blocks that others have computed are shared (``prefix_cache``).  A request
whose next block is filled by another in the same step waits, once, for the next step: n answers to one
prompt compute it once.  When no block is free, the last running request gives back all its blocks and
waits again; it finds those that nobody needed meanwhile, and computes the rest again.

A running request also owns a state slot (``state_cache``), of which there is one for each that may run.  It
goes to another request as soon as its owner stops: a step that is still on its way was enqueued before any
step of the next owner, whose first one reads nothing of what the slot holds.

``schedule`` counts the tokens of a step as computed, so that the next step can be scheduled before
``complete`` tells which tokens it gave; until then these are ``pending``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from kerf_runtime.engine.blocks import BlockPool
from kerf_runtime.engine.fair_queue import FairQueue, place_of
from kerf_runtime.engine.messages import SamplingParams, TokenOutput
from kerf_runtime.engine.prefix_cache import PrefixCache
from kerf_runtime.engine.request import Request, RequestState
from kerf_runtime.errors import RequestError

__all__ = ["Batch", "Scheduled", "Scheduler", "SchedulerLimits"]


@dataclass(frozen=True)
class SchedulerLimits:
    """What a step and a request may be.

    Attributes:
        max_num_seqs: requests in one step.
        max_num_batched_tokens: tokens in one step; at least ``max_num_seqs``.
        max_model_len: tokens of one request, prompt and answer together; a prompt of as many yields one more.
        vocab_size: token ids are below it.
        block_size: tokens per cache block.
        num_blocks: cache blocks; enough for one request of ``max_model_len`` tokens.
        prefix_caching: whether requests that begin alike share blocks.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int
    prefix_caching: bool = True


class Scheduled(msgspec.Struct, frozen=True):
    """The part of a request that runs in one step: tokens ``start`` to ``start + count``.

    The last of them may be pending: what the step before yields.  ``samples`` is True if there is no
    later token, known or pending, so that the step yields a new one.
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
    """Holds all live requests.  Every batch that ``schedule`` gives is completed, in the same order."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks, limits.block_size)
        self.prefixes = PrefixCache(self.pool, enabled=limits.prefix_caching)
        self.preemptions = 0
        self._free_slots = list(range(limits.max_num_seqs, 0, -1))
        """State slots of nobody; 0 is that of padding."""
        self._added = 0
        self._requests: dict[str, Request] = {}
        self._waiting = FairQueue()
        self._running = FairQueue()
        self._filling: list[tuple[Request, int]] = []
        """Who fills a block in the last scheduled step, and how many of its blocks were full before."""

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
        """Whether a request is live."""
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
        priority: int = 0,
    ) -> Request:
        """Queue a request.

        Args:
            request_id: unique among live requests.
            prompt: its tokens.
            params: how its answer is chosen.
            eos_token_ids: the model's own, which end it unless they are ignored.
            seed: of its random numbers.
            arrived: monotonic seconds.
            priority: lower is sooner; see ``fair_queue``.

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
            place=(place_of(arrived, priority), self._added),
            max_length=min(len(prompt) + params.max_tokens, self.limits.max_model_len),
        )
        self._added += 1
        self._requests[request_id] = request
        self._waiting.add(request)
        return request

    def _check(self, request_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        limits = self.limits
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is already in use", where="request_id")
        if not prompt:
            raise RequestError("the prompt is empty", where="prompt")
        # The last token of an answer is not computed: a prompt that fills the model still yields one.
        if len(prompt) > limits.max_model_len:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, above maxModelLen {limits.max_model_len}",
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
        self._finish(request)
        return True

    def schedule(self) -> Batch | None:
        """The next step, or None if there is nothing to run (before the last step is completed)."""
        for request, _ in self._filling:
            self.prefixes.publish(request)
        self._filling = []
        preemptions_before = self.preemptions
        items, prompts = self._schedule_decodes()
        budget = self.limits.max_num_batched_tokens - len(items)
        for request in prompts:
            if budget and request.state is RequestState.RUNNING:
                budget -= self._take(items, request, budget)
        first_time: list[Request] = []
        # Nobody is admitted in a step that took blocks away: the next step would do it again.
        if self.preemptions == preemptions_before:
            self._admit(items, budget, first_time)
        if not items:
            return None
        return Batch(
            items=tuple(items),
            num_tokens=sum(item.count for item in items),
            uniform_decode=all(item.count == 1 for item in items),
            first_time=tuple(first_time),
        )

    def _schedule_decodes(self) -> tuple[list[Scheduled], list[Request]]:
        """One token each of those that decode; and those whose prompts are partly computed, in order."""
        items: list[Scheduled] = []
        prompts: list[Request] = []
        for request in tuple(self._running):
            # An earlier request may have preempted this one a moment ago.
            if request.state is not RequestState.RUNNING:
                continue
            remaining = request.remaining
            if remaining > 1:
                prompts.append(request)
            elif remaining == 1 and not request.is_ending and self._grow(request):
                self._take(items, request, 1)
        return items, prompts

    def _grow(self, request: Request) -> bool:
        """Make sure there is a block for the next token; False if the request lost its own instead."""
        if request.computed < len(request.blocks) * self.limits.block_size:
            return True
        while not self.pool.free:
            victim = self._running.last
            self._preempt(victim)
            if victim is request:
                return False
        request.blocks.extend(self.pool.take(1))
        return True

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._release(request)
        request.computed = 0
        request.state = RequestState.WAITING
        self._waiting.add(request)
        self.preemptions += 1

    def _admit(self, items: list[Scheduled], budget: int, first_time: list[Request]) -> None:
        while budget and len(self._waiting) and len(self._running) < self.limits.max_num_seqs:
            request = self._waiting.first
            if request.pending:
                return  # preempted with a token on its way, which must be known to be computed again
            found = self.prefixes.find(request)
            if not request.was_deferred and self.prefixes.is_being_filled(
                request, len(found), self._filling
            ):
                request.was_deferred = True
                return
            needed = self.pool.blocks_for(len(request.tokens)) - len(found)
            # One block stays free for each running request, so that admitting does not preempt.
            spare = self.pool.free - self.pool.free_among(found) - len(self._running)
            if needed > spare:
                return
            self._waiting.remove(request)
            self._start(request, found, needed)
            if not request.was_scheduled:
                request.was_scheduled = True
                request.cached_tokens = request.computed
                first_time.append(request)
            budget -= self._take(items, request, budget)

    def _start(self, request: Request, found: list[int], needed: int) -> None:
        """Give a request the blocks that were found and the others it needs."""
        self.pool.share(found)
        self.prefixes.count(request, found)
        request.blocks = [*found, *self.pool.take(needed)]
        request.computed = len(found) * self.pool.block_size
        request.published = len(found)
        request.state_slot = self._free_slots.pop()
        request.state = RequestState.RUNNING
        self._running.add(request)

    def _take(self, items: list[Scheduled], request: Request, budget: int) -> int:
        start, remaining, size = request.computed, request.remaining, self.limits.block_size
        count = min(remaining, budget)
        items.append(Scheduled(request, start, count, count == remaining))
        request.computed = start + count
        if count == remaining:
            request.pending += 1
        if start // size != request.computed // size:
            self._filling.append((request, start // size))
        return count

    def complete(self, batch: Batch, sampled: Sequence[int]) -> list[TokenOutput]:
        """Record what a step yielded.

        Args:
            batch: from ``schedule``; the oldest that was not completed.
            sampled: one token for every item that samples, in order.

        Returns:
            What is new, one entry per request that got a token.
        """
        outputs = []
        sampling = (item.request for item in batch.items if item.samples)
        for request, token in zip(sampling, sampled, strict=True):
            request.pending -= 1
            if request.state is RequestState.FINISHED:
                continue  # since the step was scheduled
            reason = request.append(token)
            cached = request.cached_tokens if request.generated == 1 else 0
            outputs.append(TokenOutput(request.request_id, [token], reason, cached_tokens=cached))
            if reason is not None:
                self._finish(request)
        return outputs

    def _finish(self, request: Request) -> None:
        del self._requests[request.request_id]
        waits = request.state is RequestState.WAITING
        (self._waiting if waits else self._running).remove(request)
        self._release(request)
        request.state = RequestState.FINISHED

    def _release(self, request: Request) -> None:
        self.prefixes.publish(request)
        self.pool.give_back(request.blocks)
        request.blocks = []
        if request.state_slot is not None:
            self._free_slots.append(request.state_slot)
            request.state_slot = None
