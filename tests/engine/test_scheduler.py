"""The scheduler: tables of single decisions, and a state machine for what must always hold."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kerf_runtime.engine.messages import SamplingParams, TokenOutput
from kerf_runtime.engine.request import Request
from kerf_runtime.engine.scheduler import Batch, Scheduler, SchedulerLimits
from kerf_runtime.errors import RequestError

EOS = 99


def make_scheduler(
    *, seqs: int = 4, tokens: int = 16, length: int = 64, block_size: int = 4, blocks: int = 64
) -> Scheduler:
    return Scheduler(
        SchedulerLimits(
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            max_model_len=length,
            vocab_size=100,
            block_size=block_size,
            num_blocks=blocks,
        )
    )


def add(
    scheduler: Scheduler,
    name: str,
    prompt: int,
    max_tokens: int = 4,
    *,
    ignore_eos: bool = False,
    stop: tuple[int, ...] = (),
) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, stop_token_ids=stop)
    return scheduler.add(
        name, list(range(prompt)), params, eos_token_ids=(EOS,), seed=0, arrived=0.0
    )


def step(scheduler: Scheduler, token: int = 7) -> tuple[Batch, list[TokenOutput]]:
    batch = scheduler.schedule()
    assert batch is not None
    return batch, scheduler.complete(batch, [token] * sum(item.samples for item in batch.items))


def shape(batch: Batch) -> list[tuple[str, int, int]]:
    return [(item.request.request_id, item.start, item.count) for item in batch.items]


def test_nothing_to_do_gives_no_batch() -> None:
    assert make_scheduler().schedule() is None


def test_a_prompt_that_fits_runs_at_once_and_yields_a_token() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", prompt=5)
    batch, outputs = step(scheduler)
    assert shape(batch) == [("a", 0, 5)]
    assert outputs == [TokenOutput("a", [7], None)]


def test_a_long_prompt_runs_in_chunks_of_the_budget() -> None:
    scheduler = make_scheduler(tokens=8)
    add(scheduler, "a", prompt=20)
    chunks = [step(scheduler) for _ in range(3)]
    assert [shape(batch) for batch, _ in chunks] == [[("a", 0, 8)], [("a", 8, 8)], [("a", 16, 4)]]
    assert [len(outputs) for _, outputs in chunks] == [0, 0, 1]


def test_decoding_goes_on_beside_a_long_prompt() -> None:
    scheduler = make_scheduler(tokens=8)
    add(scheduler, "a", prompt=3)
    step(scheduler)
    add(scheduler, "b", prompt=20)
    batch, outputs = step(scheduler)
    assert shape(batch) == [("a", 3, 1), ("b", 0, 7)]
    assert [output.request_id for output in outputs] == ["a"]


def test_prompts_are_packed_into_one_step() -> None:
    scheduler = make_scheduler(tokens=16)
    for name in "abc":
        add(scheduler, name, prompt=6)
    assert shape(step(scheduler)[0]) == [("a", 0, 6), ("b", 0, 6), ("c", 0, 4)]


def test_only_one_token_each_is_a_uniform_decode() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", prompt=3), add(scheduler, "b", prompt=1)
    assert not step(scheduler)[0].uniform_decode
    assert step(scheduler)[0].uniform_decode


def test_a_step_never_has_more_requests_than_allowed() -> None:
    scheduler = make_scheduler(seqs=2)
    for name in "abc":
        add(scheduler, name, prompt=2)
    assert shape(step(scheduler)[0]) == [("a", 0, 2), ("b", 0, 2)]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)


def test_a_request_that_does_not_fit_is_not_overtaken() -> None:
    scheduler = make_scheduler(blocks=16, length=64)
    add(scheduler, "a", prompt=40, max_tokens=20)
    step(scheduler)
    add(scheduler, "big", prompt=40), add(scheduler, "small", prompt=1)
    for _ in range(4):
        assert "small" not in [name for name, _, _ in shape(step(scheduler)[0])]


@pytest.mark.parametrize(
    ("token", "options", "reason"),
    [
        pytest.param(EOS, {}, "stop", id="end-of-text token"),
        pytest.param(EOS, {"ignore_eos": True}, None, id="end-of-text token ignored"),
        pytest.param(5, {"stop": (5,)}, "stop", id="stop token"),
        pytest.param(7, {"max_tokens": 1}, "length", id="max_tokens"),
    ],
)
def test_a_request_ends_with_its_reason(
    token: int, options: dict[str, object], reason: str | None
) -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 3, **options)  # type: ignore[arg-type]
    assert step(scheduler, token)[1] == [TokenOutput("a", [token], reason)]
    assert scheduler.has_work == (reason is None)


def test_a_request_ends_at_the_longest_sequence() -> None:
    scheduler = make_scheduler(length=8)
    add(scheduler, "a", prompt=6, max_tokens=50)
    assert [step(scheduler)[1][0].finish_reason for _ in range(2)] == [None, "length"]


def test_all_blocks_are_free_when_a_request_is_over() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", prompt=9, max_tokens=1)
    step(scheduler)
    assert scheduler.pool.used == 0


def test_the_youngest_gives_way_when_blocks_run_out_and_continues_later() -> None:
    scheduler = make_scheduler(blocks=6, length=24, block_size=4)
    old = add(scheduler, "old", prompt=7, max_tokens=12)
    young = add(scheduler, "young", prompt=7, max_tokens=10)
    while scheduler.preemptions == 0:
        step(scheduler)
    assert young.blocks == []
    assert young.generated > 0, "what was generated is kept and only computed again"
    assert len(old.blocks) > 0
    outputs: list[TokenOutput] = []
    while scheduler.has_work:
        outputs += step(scheduler)[1]
    assert (old.generated, young.generated) == (12, 10)
    assert scheduler.pool.used == 0


@pytest.mark.parametrize("when", ["waiting", "running"])
def test_an_aborted_request_frees_its_blocks(when: str) -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", prompt=5)
    if when == "running":
        step(scheduler)
    assert scheduler.abort("a")
    assert not scheduler.abort("a")
    assert (scheduler.pool.used, scheduler.has_work) == (0, False)


def test_an_abort_while_the_step_runs_drops_its_token() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", prompt=5)
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.abort("a")
    assert scheduler.complete(batch, [1]) == []


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "field", "message"),
    [
        ([], 4, "prompt", "the prompt is empty"),
        (list(range(64)), 4, "prompt", "64 tokens, which leaves no room"),
        ([1], 0, "max_tokens", "max_tokens is 0"),
        ([100], 4, "prompt", "token id 100"),
        ([-1], 4, "prompt", "token id -1"),
    ],
)
def test_a_request_that_can_never_run_is_refused(
    prompt: list[int], max_tokens: int, field: str, message: str
) -> None:
    scheduler = make_scheduler()
    with pytest.raises(RequestError, match=message) as caught:
        scheduler.add(
            "a",
            prompt,
            SamplingParams(max_tokens=max_tokens),
            eos_token_ids=(),
            seed=0,
            arrived=0.0,
        )
    assert caught.value.where == field
    assert not scheduler.has_work


def test_a_request_beyond_all_blocks_is_refused() -> None:
    scheduler = make_scheduler(blocks=4, length=64, block_size=4)
    with pytest.raises(RequestError, match="need 6 KV-cache blocks, and there are 4"):
        add(scheduler, "a", prompt=10, max_tokens=14)


def test_an_id_is_used_once() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", prompt=3)
    with pytest.raises(RequestError, match="already in use"):
        add(scheduler, "a", prompt=3)


class SchedulerMachine(RuleBasedStateMachine):
    """Random requests, aborts and steps, checked against a model of the KV cache."""

    @initialize(
        seqs=st.integers(1, 5),
        extra=st.integers(0, 20),
        length=st.integers(2, 40),
        block_size=st.integers(1, 6),
        spare=st.integers(0, 8),
    )
    def begin(self, seqs: int, extra: int, length: int, block_size: int, spare: int) -> None:
        self.scheduler = make_scheduler(
            seqs=seqs,
            tokens=seqs + extra,
            length=length,
            block_size=block_size,
            blocks=-(-length // block_size) + spare,
        )
        self.live: dict[str, Request] = {}
        self.cached: dict[int, tuple[str, int]] = {}
        """Cache slot -> the request and position stored there last."""
        self.first_runs: list[int] = []
        self.serial = 0

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        limits = self.scheduler.limits
        prompt = data.draw(st.integers(1, limits.max_model_len - 1))
        most = data.draw(st.integers(1, 12))
        request = add(self.scheduler, str(self.serial), prompt, most, ignore_eos=True)
        self.live[request.request_id] = request
        self.serial += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        assert self.scheduler.abort(name)
        del self.live[name]

    @rule()
    def step(self) -> None:
        limits = self.scheduler.limits
        batch = self.scheduler.schedule()
        assert (batch is None) == (not self.live)
        if batch is None:
            return
        assert 0 < batch.num_tokens <= limits.max_num_batched_tokens
        assert len(batch.items) <= limits.max_num_seqs
        assert len({item.request.request_id for item in batch.items}) == len(batch.items)
        assert batch.uniform_decode == all(item.count == 1 for item in batch.items)
        for item in batch.items:
            request = item.request
            assert item.start == request.computed
            assert item.samples == (item.start + item.count == len(request.tokens))
            slots = [
                block * limits.block_size + offset
                for block in request.blocks
                for offset in range(limits.block_size)
            ]
            for position in range(item.start, item.start + item.count):
                self.cached[slots[position]] = (request.request_id, position)
            # Everything the step attends to is still what this request stored.
            for position in range(item.start + item.count):
                assert self.cached[slots[position]] == (request.request_id, position)
        self.first_runs += [int(request.request_id) for request in batch.first_time]
        sampled = sum(item.samples for item in batch.items)
        for output in self.scheduler.complete(batch, [3] * sampled):
            if output.finish_reason is not None:
                request = self.live.pop(output.request_id)
                expected = min(
                    request.params.max_tokens, limits.max_model_len - request.prompt_length
                )
                assert request.generated == expected

    @invariant()
    def every_block_has_one_owner(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        owned = [block for request in self.live.values() for block in request.blocks]
        assert len(owned) == len(set(owned))
        assert self.scheduler.pool.used == len(owned)
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.live)

    @invariant()
    def requests_start_in_order_of_arrival(self) -> None:
        if hasattr(self, "first_runs"):
            assert self.first_runs == sorted(self.first_runs)

    def teardown(self) -> None:
        """Whatever happened before, everything finishes, in a bounded number of steps."""
        if not hasattr(self, "scheduler"):
            return
        # Alone, a request takes at most one step per token; a preemption repeats them.
        bound = 2 * sum(len(r.tokens) + r.params.max_tokens for r in self.live.values()) ** 2 + 1
        for _ in range(bound):
            if not self.live:
                break
            self.step()
        assert not self.live
        assert self.scheduler.pool.used == 0


SchedulerMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None
)
TestSchedulerAlways = SchedulerMachine.TestCase
