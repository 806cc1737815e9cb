"""Long work takes turns with everything else on the event loop."""

from __future__ import annotations

import asyncio
import gc
from itertools import pairwise

import pytest

from kerf_runtime.server import lifecycle, turns
from kerf_runtime.server.turns import in_turns


@pytest.fixture
def every_item_is_a_turn(monkeypatch):
    monkeypatch.setattr(turns, "TURN_SECONDS", 0.0)


async def rounds(made, seen):
    """Note at every round of the event loop how many items there are."""
    while True:
        seen.append(len(made))
        await asyncio.sleep(0)


def run_beside_rounds(work, made):
    """Run a coroutine; how many items were made by every round of the event loop meanwhile."""
    seen: list[int] = []

    async def main():
        ticking = asyncio.create_task(rounds(made, seen))
        await asyncio.sleep(0)
        try:
            return await work
        finally:
            ticking.cancel()

    return asyncio.run(main()), seen


def noting(made, count):
    for item in range(count):
        made.append(item)
        yield item


def test_short_work_is_done_at_once(monkeypatch):
    monkeypatch.setattr(turns, "TURN_SECONDS", 60.0)
    made: list[int] = []
    found, seen = run_beside_rounds(in_turns(noting(made, 100)), made)
    assert found == list(range(100))
    assert seen == [0]


@pytest.mark.usefixtures("every_item_is_a_turn")
def test_others_have_their_turn_between_two_turns_of_long_work():
    made: list[int] = []
    found, seen = run_beside_rounds(in_turns(noting(made, 20)), made)
    assert found == list(range(20))
    assert {*range(1, 20)} <= {*seen}


@pytest.mark.usefixtures("every_item_is_a_turn")
def test_many_who_have_long_work_share_one_turn_per_round():
    made: list[int] = []

    async def all_of_them():
        return await asyncio.gather(*(in_turns(noting(made, 10)) for _ in range(8)))

    found, seen = run_beside_rounds(all_of_them(), made)
    assert found == [list(range(10))] * 8
    grown = [after - before for before, after in pairwise(seen)]
    assert sorted(grown)[-2:] == [1, 8]  # all began in the same round


@pytest.mark.usefixtures("every_item_is_a_turn")
def test_work_that_fails_or_is_given_up_leaves_the_turns_to_others():
    def failing():
        yield from range(3)
        raise ValueError("no more")

    async def main():
        endless = asyncio.create_task(in_turns(iter(int, 1)))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="no more"):
            await in_turns(failing())
        endless.cancel()
        return await in_turns(range(3))

    assert asyncio.run(main()) == [0, 1, 2]


def test_a_server_has_its_cycles_collected_rarely(monkeypatch):
    class StoppedHereError(Exception):
        pass

    def stop_here(*ignored):
        raise StoppedHereError

    before = gc.get_threshold()
    monkeypatch.setattr(lifecycle, "create_app", stop_here)
    try:
        with pytest.raises(StoppedHereError):
            asyncio.run(lifecycle.serve(None, None, None, None))
        assert gc.get_threshold()[0] >= 50_000
    finally:
        gc.set_threshold(*before)
