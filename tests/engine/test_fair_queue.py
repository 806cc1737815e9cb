"""The order of requests: arrival, moved by priority."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kerf_runtime.engine.fair_queue import SECONDS_PER_PRIORITY, FairQueue, place_of
from kerf_runtime.engine.messages import SamplingParams
from kerf_runtime.engine.request import Request


def make_request(serial: int, arrived: float, priority: int) -> Request:
    return Request(
        request_id=str(serial),
        tokens=[1],
        prompt_length=1,
        params=SamplingParams(max_tokens=1),
        stop_ids=frozenset(),
        seed=0,
        arrived=arrived,
        place=(place_of(arrived, priority), serial),
        max_length=2,
    )


arrivals = st.lists(st.tuples(st.floats(0, 1e5), st.integers(-100, 100)), min_size=1, max_size=30)


def test_a_lower_number_comes_first_among_those_that_arrive_together() -> None:
    queue = FairQueue()
    for serial, priority in enumerate((3, 0, -1, 0)):
        queue.add(make_request(serial, 5.0, priority))
    assert [request.request_id for request in queue] == ["2", "1", "3", "0"]


def test_waiting_makes_up_for_priority() -> None:
    assert place_of(0.0, 2) > place_of(2 * SECONDS_PER_PRIORITY - 1, 0)
    assert place_of(0.0, 2) < place_of(2 * SECONDS_PER_PRIORITY + 1, 0)


@given(arrivals, st.data())
def test_a_queue_is_sorted_and_loses_whom_it_is_told_to(
    requests: list[tuple[float, int]], data: st.DataObject
) -> None:
    queue = FairQueue()
    made = [make_request(serial, *request) for serial, request in enumerate(requests)]
    for request in made:
        queue.add(request)
    gone = data.draw(st.sampled_from(made))
    queue.remove(gone)
    left = sorted((request for request in made if request is not gone), key=lambda r: r.place)
    assert list(queue) == left
    if left:
        assert (queue.first, queue.last) == (left[0], left[-1])


@given(arrivals)
def test_requests_of_one_priority_are_in_order_of_arrival(
    requests: list[tuple[float, int]],
) -> None:
    queue = FairQueue()
    for serial, (arrived, _) in enumerate(sorted(requests)):
        queue.add(make_request(serial, arrived, 7))
    assert [int(request.request_id) for request in queue] == list(range(len(requests)))


@given(arrivals)
def test_nobody_is_overtaken_by_those_that_arrive_long_after(
    requests: list[tuple[float, int]],
) -> None:
    made = [(arrived, priority, place_of(arrived, priority)) for arrived, priority in requests]
    for arrived, priority, place in made:
        for later, other, theirs in made:
            if later - arrived > (priority - other) * SECONDS_PER_PRIORITY + 1e-6:
                assert theirs > place
