"""The queue: one look at a time per key, bursts become one, failures come again with back-off."""

from __future__ import annotations

import asyncio
import random

import pytest
from tests.patience import PATIENCE, until

from kerf_operator.workqueue import WorkQueue

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_many_adds_of_a_waiting_key_are_one() -> None:
    queue: WorkQueue[str] = WorkQueue()
    for _ in range(5):
        queue.add("a")
    assert len(queue) == 1
    assert await queue.get() == "a"
    assert len(queue) == 0


async def test_a_key_added_while_it_is_handled_comes_exactly_once_more() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add("a")
    await queue.get()
    queue.add("a")
    queue.add("a")
    assert len(queue) == 0, "it must not be handled twice at a time"
    queue.done("a")
    assert await queue.get() == "a"
    queue.done("a")
    assert len(queue) == 0


async def test_of_two_delays_the_earlier_counts() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add_after("a", 0.01)
    queue.add_after("a", 3600)
    assert await asyncio.wait_for(queue.get(), PATIENCE) == "a"
    queue.done("a")
    queue.add_after("b", 3600)
    queue.add_after("b", 0.01)
    assert await asyncio.wait_for(queue.get(), PATIENCE) == "b"


async def test_an_event_makes_the_delayed_look_unnecessary() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add_after("a", 0.05)
    queue.add("a")
    await queue.get()
    queue.done("a")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(queue.get(), 0.2)


async def test_delays_of_a_failing_key_double_up_to_the_limit_and_success_resets_them() -> None:
    queue: WorkQueue[str] = WorkQueue(base_delay=1, max_delay=5)
    assert [queue.failed("a") for _ in range(4)] == [1, 2, 4, 5]
    queue.succeeded("a")
    assert queue.failed("a") == 1
    queue.close()


async def test_a_forgotten_key_does_not_come_back() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add_after("a", 0.01)
    queue.forget("a")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(queue.get(), 0.1)


@pytest.mark.parametrize("seed", range(5))
async def test_nothing_is_lost_and_nothing_runs_twice_at_a_time(seed: int) -> None:
    randomly = random.Random(seed)
    queue: WorkQueue[int] = WorkQueue()
    running: set[int] = set()
    seen_after_last_add: dict[int, bool] = {}

    async def work() -> None:
        while True:
            key = await queue.get()
            assert key not in running
            running.add(key)
            seen_after_last_add[key] = True
            await asyncio.sleep(randomly.random() / 500)
            running.discard(key)
            queue.done(key)

    workers = [asyncio.create_task(work()) for _ in range(4)]
    for _ in range(200):
        key = randomly.randrange(10)
        seen_after_last_add[key] = False
        queue.add(key)
        if randomly.random() < 0.3:
            await asyncio.sleep(randomly.random() / 500)
    await until(lambda: not len(queue) and not queue.active)
    for worker in workers:
        assert not worker.done(), "a worker has failed"
        worker.cancel()
    assert all(seen_after_last_add.values())
