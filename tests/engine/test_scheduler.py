"""The scheduler: tables of single decisions, and a simulation of what must always hold."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kerf_runtime.engine.fair_queue import SECONDS_PER_PRIORITY
from kerf_runtime.engine.messages import SamplingParams, TokenOutput
from kerf_runtime.engine.request import Request, RequestState
from kerf_runtime.engine.scheduler import Batch, Scheduler, SchedulerLimits
from kerf_runtime.errors import RequestError

EOS = 99


def make_scheduler(
    *,
    seqs: int = 4,
    tokens: int = 16,
    length: int = 64,
    block_size: int = 4,
    blocks: int = 64,
    caching: bool = True,
) -> Scheduler:
    return Scheduler(
        SchedulerLimits(
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            max_model_len=length,
            vocab_size=100,
            block_size=block_size,
            num_blocks=blocks,
            prefix_caching=caching,
        )
    )


def add(
    scheduler: Scheduler,
    name: str,
    prompt: int | list[int],
    max_tokens: int = 4,
    *,
    ignore_eos: bool = False,
    stop: tuple[int, ...] = (),
    arrived: float = 0.0,
    priority: int = 0,
) -> Request:
    """Queue a prompt, or one of this many tokens that no other name's begins like."""
    if isinstance(prompt, int):
        prompt = [ord(name[0]) % 100, *range(prompt - 1)]
    return scheduler.add(
        name,
        prompt,
        SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, stop_token_ids=stop),
        eos_token_ids=(EOS,),
        seed=0,
        arrived=arrived,
        priority=priority,
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
        (list(range(65)), 4, "prompt", "65 tokens, above maxModelLen 64"),
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


def test_a_prompt_that_begins_like_an_earlier_one_computes_only_the_rest() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", list(range(10)))
    step(scheduler)
    add(scheduler, "b", [*range(9), 50, 51])
    batch, outputs = step(scheduler)
    assert shape(batch) == [("a", 10, 1), ("b", 8, 3)]
    assert outputs == [TokenOutput("a", [7]), TokenOutput("b", [7], cached_tokens=8)]
    assert scheduler.pool.used == 3 + 1, "two blocks are shared"
    assert step(scheduler)[1][1].cached_tokens == 0, "it is told once"


def test_what_a_finished_request_computed_is_found_with_its_answer() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", list(range(10)), max_tokens=3)
    while scheduler.has_work:
        step(scheduler)
    assert (scheduler.pool.used, scheduler.pool.cached) == (0, 3)
    add(scheduler, "b", [*range(10), 7, 7, 7, 1])
    assert shape(step(scheduler)[0]) == [("b", 12, 2)]


def test_of_a_prompt_that_is_cached_whole_the_last_block_is_computed() -> None:
    scheduler = make_scheduler()
    for name in "ab":
        add(scheduler, name, list(range(8)), max_tokens=1)
        batch, _ = step(scheduler)
    assert shape(batch) == [("b", 4, 4)]
    add(scheduler, "c", list(range(9)), max_tokens=1)
    assert shape(step(scheduler)[0]) == [("c", 8, 1)]


def test_several_answers_to_one_prompt_compute_it_once() -> None:
    scheduler = make_scheduler()
    for name in "abc":
        add(scheduler, name, list(range(10)))
    assert shape(step(scheduler)[0]) == [("a", 0, 10)]
    assert shape(step(scheduler)[0]) == [("a", 10, 1), ("b", 8, 2), ("c", 8, 2)]
    assert (scheduler.prefixes.queries, scheduler.prefixes.hits) == (30, 16)


def test_a_request_waits_for_what_others_compute_only_once() -> None:
    scheduler = make_scheduler(blocks=8, length=32, tokens=40)
    add(scheduler, "a", list(range(16)), max_tokens=1)
    b = add(scheduler, "b", list(range(12)))
    assert shape(step(scheduler)[0]) == [("a", 0, 16)]
    assert b.was_deferred
    # What it waited for is forgotten, and computed again by somebody more urgent.
    add(scheduler, "x", 31, max_tokens=1, priority=-2)
    assert shape(step(scheduler)[0]) == [("x", 0, 31)]
    add(scheduler, "c", list(range(12)), priority=-1)
    assert shape(step(scheduler)[0]) == [("c", 0, 12), ("b", 0, 12)]


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    scheduler = make_scheduler(blocks=7, length=28, block_size=4)
    add(scheduler, "old", prompt=7, max_tokens=6)
    young = add(scheduler, "young", prompt=14, max_tokens=10)
    while scheduler.preemptions == 0:
        step(scheduler)
    while not young.blocks:
        batch, _ = step(scheduler)
    [item] = [item for item in batch.items if item.request is young]
    assert (item.start, item.count) == (16, 1)
    assert young.cached_tokens == 0, "nothing of it had been computed when it came"


def test_a_cache_that_is_switched_off_shares_nothing() -> None:
    scheduler = make_scheduler(caching=False)
    for name in "ab":
        add(scheduler, name, list(range(8)))
    assert shape(step(scheduler)[0]) == [("a", 0, 8), ("b", 0, 8)]
    assert scheduler.pool.used == 4
    assert (scheduler.pool.cached, scheduler.prefixes.queries) == (0, 0)


def test_priority_decides_who_is_admitted_first() -> None:
    scheduler = make_scheduler(seqs=1)
    for name, priority in (("a", 1), ("b", 0), ("c", -1), ("d", 0)):
        add(scheduler, name, 3, max_tokens=1, priority=priority)
    order = [step(scheduler)[1][0].request_id for _ in range(4)]
    assert order == ["c", "b", "d", "a"]


def test_priority_decides_who_gives_way_when_blocks_run_out() -> None:
    scheduler = make_scheduler(blocks=6, length=24, block_size=4)
    add(scheduler, "old", prompt=7, max_tokens=12)
    urgent = add(scheduler, "urgent", prompt=7, max_tokens=12, priority=-1)
    while scheduler.preemptions == 0:
        step(scheduler)
    assert urgent.blocks
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)


def test_a_request_is_served_although_more_urgent_ones_never_stop_coming() -> None:
    scheduler = make_scheduler(seqs=2)
    patient = add(scheduler, "patient", 3, max_tokens=2, priority=1)
    for second in range(100):
        for name in range(3):
            add(scheduler, f"{second} {name}", 3, max_tokens=1, arrived=float(second))
        step(scheduler)
        if patient.generated == 2:
            break
    # Two of the three that arrive in a second are served in it; those of the first ten go before.
    assert SECONDS_PER_PRIORITY < second <= SECONDS_PER_PRIORITY * 3 / 2 + 2


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_nobody_starves_while_more_work_comes_than_can_be_done(seed: int) -> None:
    chance = random.Random(seed)
    priority = chance.randint(0, 3)
    scheduler = make_scheduler(seqs=chance.randint(1, 3), tokens=chance.randint(3, 9))
    patient = add(scheduler, "patient", chance.randint(1, 20), 4, priority=priority)
    bound = len(patient.tokens) + 4
    serial = 0
    for second in range(500):
        for _ in range(3):
            rival = add(
                scheduler,
                str(serial),
                [chance.randrange(3) for _ in range(chance.randint(1, 20))],
                chance.randint(1, 6),
                arrived=second + 0.5,
            )
            serial += 1
            if rival.place < patient.place:
                bound += len(rival.tokens) + rival.params.max_tokens
        step(scheduler)
        if patient.state is RequestState.FINISHED:
            break
    # As long as those come that are served before, and a step for each of their tokens.
    assert second < bound + priority * SECONDS_PER_PRIORITY
    assert scheduler.num_waiting > 0


def test_the_next_step_can_be_scheduled_before_the_tokens_of_this_one_are_known() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", prompt=5, max_tokens=2)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None
    assert second is not None
    assert [shape(first), shape(second)] == [[("a", 0, 5)], [("a", 5, 1)]]
    assert scheduler.schedule() is None, "the second token is the last, whatever it is"
    assert scheduler.complete(first, [1]) == [TokenOutput("a", [1])]
    assert scheduler.complete(second, [2]) == [TokenOutput("a", [2], "length")]
    assert (scheduler.schedule(), scheduler.has_work) == (None, False)


def test_a_request_that_lost_its_blocks_waits_for_the_token_that_is_on_its_way() -> None:
    scheduler = make_scheduler(blocks=5, length=20, block_size=4)
    add(scheduler, "old", prompt=8)
    young = add(scheduler, "young", prompt=8)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None
    assert second is not None
    assert shape(second) == [("old", 8, 1)]
    assert (young.blocks, young.pending) == ([], 1)
    assert scheduler.abort("old")
    assert scheduler.schedule() is None
    assert scheduler.complete(first, [1, 2]) == [TokenOutput("young", [2])]
    batch = scheduler.schedule()
    assert batch is not None
    assert shape(batch) == [("young", 8, 1)]


def test_the_token_after_the_one_that_ends_a_request_is_dropped() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", prompt=5, max_tokens=9)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None
    assert second is not None
    assert scheduler.complete(first, [EOS]) == [TokenOutput("a", [EOS], "stop")]
    assert scheduler.complete(second, [1]) == []
    assert scheduler.pool.used == 0


STOP = 5
"""Ends a request in the simulation."""


class Simulation:
    """Random requests, aborts and steps, checked against a model of the device and its KV cache.

    Steps run as soon as they are scheduled; their tokens may be told some steps later.
    """

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        seqs, block_size = chance.randint(1, 6), chance.randint(1, 5)
        length = chance.randint(2, 40)
        self.scheduler = make_scheduler(
            seqs=seqs,
            tokens=seqs + chance.choice([0, 3, 10, 40]),
            length=length,
            block_size=block_size,
            blocks=-(-length // block_size) + chance.choice([0, 2, 6, 20]),
            caching=chance.random() < 0.8,
        )
        self.behind = chance.choice([0, 0, 1, 1, 2])
        """How many steps run before the tokens of the first of them are told."""
        self.live: dict[str, Request] = {}
        self.texts: dict[str, list[int]] = {}
        """What the device knows of a request: its prompt and all that was sampled."""
        self.cached: dict[int, tuple[int, ...]] = {}
        """Cache slot -> the text up to the token that is stored there."""
        self.steps: list[tuple[Batch, list[int]]] = []
        """That ran and were not completed, and what they sampled."""
        self.clock = 0.0

    def run(self, count: int) -> None:
        """Let requests come and go for some steps, then let all of them end."""
        for _ in range(count):
            if len(self.live) < 8:
                for _ in range(self.chance.choice([0, 0, 1, 3])):
                    self.add()
            if self.live and self.chance.random() < 0.03:
                name = self.chance.choice(sorted(self.live))
                assert self.scheduler.abort(name)
                del self.live[name]
            self.step()
            self.check_owners()
        # Alone, a request takes at most one step per token; a preemption repeats them.
        bound = 2 * sum(len(r.tokens) + r.params.max_tokens for r in self.live.values()) ** 2 + 2
        for _ in range(bound):
            if not self.live:
                break
            self.step()
            self.check_owners()
        assert not self.live
        self.complete_until(0)
        assert self.scheduler.pool.used == 0
        assert not self.scheduler.has_work

    def add(self) -> None:
        """A prompt that repeats one of a few patterns and then goes its own way."""
        chance, limits = self.chance, self.scheduler.limits
        pattern = chance.choice([(0,), (0, 1), (0, 1, 1)])
        alike, own = chance.randint(0, 20), chance.randint(1, 5)
        prompt = [pattern[i % len(pattern)] for i in range(alike)]
        prompt += [chance.randrange(3) for _ in range(own)]
        prompt = prompt[: limits.max_model_len]
        name = str(len(self.texts))
        self.texts[name] = list(prompt)
        self.live[name] = add(
            self.scheduler,
            name,
            prompt,
            chance.randint(1, 20),
            stop=(STOP,),
            arrived=self.clock,
            priority=chance.choice([0, 0, 0, -1, 2]),
        )

    def step(self) -> None:
        self.clock += 3.0
        batch = self.scheduler.schedule()
        if batch is None:
            assert self.steps or not self.live
            self.complete_until(0)
            return
        self.check_limits(batch)
        self.steps.append((batch, self.run_on_the_device(batch)))
        self.complete_until(self.behind)

    def check_limits(self, batch: Batch) -> None:
        limits = self.scheduler.limits
        assert 0 < batch.num_tokens <= limits.max_num_batched_tokens
        assert batch.num_tokens == sum(item.count for item in batch.items)
        assert len(batch.items) <= limits.max_num_seqs
        names = {item.request.request_id for item in batch.items}
        assert len(names) == len(batch.items)
        assert batch.uniform_decode == all(item.count == 1 for item in batch.items)
        # Nobody is admitted before one who is to be served earlier.
        waiting = [request.place for request in self.live.values() if not request.blocks]
        for request in batch.first_time:
            assert request.request_id in names
            assert all(request.place < place for place in waiting)

    def run_on_the_device(self, batch: Batch) -> list[int]:
        """Read, then store: what is stored in a step is not read by others in the same step."""
        size = self.scheduler.limits.block_size
        sampled = []
        for item in batch.items:
            text, blocks = self.texts[item.request.request_id], item.request.blocks
            for position in range(item.start):
                slot = blocks[position // size] * size + position % size
                assert self.cached[slot] == tuple(text[: position + 1])
        for item in batch.items:
            text, blocks = self.texts[item.request.request_id], item.request.blocks
            assert item.count > 0
            assert item.samples == (item.start + item.count == len(text))
            for position in range(item.start, item.start + item.count):
                block = blocks[position // size]
                owners = [name for name, other in self.live.items() if block in other.blocks]
                assert owners == [item.request.request_id], "what others may read is not changed"
                self.cached[block * size + position % size] = tuple(text[: position + 1])
            if item.samples:
                sampled.append(STOP if self.chance.random() < 0.04 else self.chance.randrange(3))
                text.append(sampled[-1])
                assert len(text) - item.request.prompt_length <= self.most(item.request)
        return sampled

    def most(self, request: Request) -> int:
        """The length of the longest answer; a prompt that fills the model has one token all the same."""
        room = self.scheduler.limits.max_model_len - request.prompt_length
        return min(request.params.max_tokens, max(1, room))

    def complete_until(self, left: int) -> None:
        while len(self.steps) > left:
            for output in self.scheduler.complete(*self.steps.pop(0)):
                request = self.live[output.request_id]
                text = self.texts[output.request_id]
                assert request.tokens == text[: len(request.tokens)]
                ended = "length" if request.generated == self.most(request) else None
                if output.token_ids == [STOP]:
                    ended = "stop"
                assert output.finish_reason == ended
                assert output.cached_tokens < request.prompt_length
                if ended is not None:
                    del self.live[output.request_id]

    def check_owners(self) -> None:
        pool, size = self.scheduler.pool, self.scheduler.limits.block_size
        owners: dict[int, list[tuple[int, ...]]] = {}
        for name, request in self.live.items():
            for index, block in enumerate(request.blocks):
                owners.setdefault(block, []).append(tuple(self.texts[name][: (index + 1) * size]))
        assert pool.used == len(owners)
        assert pool.free + pool.used == pool.total
        assert all(0 <= block < pool.total for block in owners)
        for texts in owners.values():
            assert len(set(texts)) == 1, "only equal texts share a block"
            assert len(texts) == 1 or len(texts[0]) % size == 0, "only full blocks are shared"
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.live)
        assert self.scheduler.limits.prefix_caching or not pool.cached
        slots = [r.state_slot for r in self.live.values() if r.state is RequestState.RUNNING]
        waiting = [r.state_slot for r in self.live.values() if r.state is RequestState.WAITING]
        assert len(slots) == self.scheduler.num_running
        assert set(waiting) <= {None}
        free = self.scheduler._free_slots
        assert sorted([*slots, *free]) == list(range(1, self.scheduler.limits.max_num_seqs + 1))


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_whatever_comes_every_request_ends_and_reads_only_its_own_text(seed: int) -> None:
    Simulation(seed).run(40)
