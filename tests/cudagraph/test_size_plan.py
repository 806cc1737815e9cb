"""The planned sizes are the best there are, compared with every list there is."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kerf_runtime.config import CUDAGraphMode
from kerf_runtime.cudagraph.dispatcher import capture_plan
from kerf_runtime.cudagraph.size_plan import Limit, count_graphs, plan_sizes, waste_of
from kerf_runtime.errors import ConfigError

RECORDING = [mode for mode in CUDAGraphMode if mode is not CUDAGraphMode.NONE]
histograms = st.dictionaries(st.integers(1, 14), st.integers(0, 30), max_size=9)


def cost_of(limit, mode, sizes, max_num_seqs):
    """What the graphs of ``sizes`` take of a limit."""
    plan = capture_plan(mode, sizes, max_num_seqs)
    return sum(limit.decode if descriptor.uniform_decode else limit.mixed for _, descriptor in plan)


def brute_force(histogram, *, limits, max_num_seqs, max_size, mode):
    """(least padding, fewest graphs that reach it) over every list of sizes; None without one."""
    if mode is CUDAGraphMode.FULL_DECODE_ONLY:
        max_size = max_num_seqs
    held = {size for size, count in histogram.items() if count and size <= max_size}
    least = max(held | {max_num_seqs})
    allowed = {size: count for size, count in histogram.items() if size <= max_size}
    found = [
        (waste_of(sizes, allowed).padding, count_graphs(mode, sizes, max_num_seqs))
        for length in range(1, max_size + 1)
        for sizes in combinations(range(1, max_size + 1), length)
        if sizes[-1] >= least
        and all(cost_of(limit, mode, sizes, max_num_seqs) <= limit.most for limit in limits)
    ]
    return min(found, default=None)


@settings(max_examples=150, deadline=None)
@example({1: 1, 3: 1}, CUDAGraphMode.FULL, 3, 2, 1, Limit(99))
@given(
    histograms,
    st.sampled_from(RECORDING),
    st.integers(1, 12),
    st.integers(1, 9),
    st.integers(0, 4),
    st.builds(Limit, st.integers(1, 60), st.integers(1, 9), st.integers(1, 9), st.just("bytes")),
)
def test_no_list_of_sizes_wastes_less_than_the_planned_one(
    histogram, mode, max_graphs, max_num_seqs, more, memory
):
    limits = {
        "limits": [Limit(max_graphs), memory],
        "max_num_seqs": max_num_seqs,
        "max_size": min(max_num_seqs + more, 10),
        "mode": mode,
    }
    best = brute_force(histogram, **limits)
    if best is None:
        with pytest.raises(
            ConfigError, match=rf"({max_graphs} graphs|{memory.most} bytes) are too few"
        ):
            plan_sizes(histogram, **limits)
        return
    sizes = plan_sizes(histogram, **limits)
    assert (waste_of(sizes, histogram).padding, count_graphs(mode, sizes, max_num_seqs)) == best
    assert sizes == tuple(sorted(set(sizes)))
    assert max_num_seqs <= sizes[-1] <= limits["max_size"]


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.integers(1, 400), st.integers(1, 1000), min_size=1, max_size=60),
    st.integers(1, 40),
    st.integers(1, 400),
)
def test_the_fast_search_finds_what_the_quadratic_one_finds(histogram, max_graphs, max_num_seqs):
    sizes = plan_sizes(
        histogram, limits=[Limit(max_graphs)], max_num_seqs=max_num_seqs, max_size=400
    )
    nodes = [0, *sorted(set(histogram) | {max(*histogram, max_num_seqs)})]

    def step(low, high):
        return sum(count * (high - n) for n, count in histogram.items() if low < n <= high)

    steps = {(a, b): step(a, b) for a, b in combinations(nodes, 2)}
    waste = {0: 0}
    for _ in range(max_graphs):
        waste |= {
            b: min(
                [waste.get(b, float("inf"))]
                + [waste[a] + steps[a, b] for a in nodes if a < b and a in waste]
            )
            for b in reversed(nodes[1:])
        }
    assert waste_of(sizes, histogram).padding == waste[nodes[-1]]
    assert len(sizes) <= max_graphs


def test_sizes_are_planned_by_example():
    histogram = {1: 100, 3: 50, 8: 10, 30: 1}
    plan = {
        k: plan_sizes(histogram, limits=[Limit(k)], max_num_seqs=8, max_size=32)
        for k in range(1, 6)
    }
    assert plan == {
        1: (30,),
        2: (3, 30),
        3: (3, 8, 30),
        4: (1, 3, 8, 30),
        5: (1, 3, 8, 30),
    }


def test_the_largest_size_holds_a_full_decode_batch_that_was_never_seen():
    assert plan_sizes({2: 9}, limits=[Limit(4)], max_num_seqs=16, max_size=64) == (2, 16)


def test_batches_above_the_largest_allowed_size_do_not_count():
    histogram = {4: 1, 500: 1000}
    assert plan_sizes(histogram, limits=[Limit(4)], max_num_seqs=8, max_size=64) == (4, 8)
    assert waste_of((4, 8), histogram).uncaptured == 1000


def test_a_size_that_needs_a_decode_graph_too_counts_twice():
    limits = {"max_num_seqs": 4, "max_size": 16, "mode": CUDAGraphMode.FULL_AND_PIECEWISE}
    histogram = {1: 10, 4: 10, 8: 10, 16: 10}
    assert plan_sizes(histogram, limits=[Limit(6)], **limits) == (1, 4, 8, 16)
    assert plan_sizes(histogram, limits=[Limit(5)], **limits) == (4, 8, 16)
    with pytest.raises(ConfigError, match=r"1 graphs are too few: .* needs 2 for the largest size"):
        plan_sizes(histogram, limits=[Limit(1)], **limits)


def test_waste_says_what_every_size_does():
    waste = waste_of((2, 8), {1: 3, 2: 1, 5: 2, 9: 4})
    assert [(use.size, use.steps, use.padding) for use in waste.uses] == [(2, 4, 3), (8, 2, 6)]
    assert (waste.uncaptured, waste.steps, waste.padding, waste.tokens) == (4, 10, 9, 15)
    assert waste.ratio == pytest.approx(9 / 24)
    assert waste_of((), {}).ratio == 0


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_size": 7}, r"largest size 7 is below maxNumSeqs 8"),
        ({"limits": [Limit(0)]}, r"0 graphs are too few: mode PIECEWISE needs 1 .* size 8"),
        ({"mode": CUDAGraphMode.NONE}, r"mode NONE records no graphs"),
    ],
)
def test_limits_that_no_list_can_have_are_errors_with_the_numbers(limits, words):
    with pytest.raises(ConfigError, match=words):
        plan_sizes({1: 1}, **{"limits": [Limit(4)], "max_num_seqs": 8, "max_size": 16, **limits})


def test_a_size_that_was_never_seen_is_taken_where_it_saves_decode_graphs():
    # 2 holds every decode batch, so that 3 needs no decode graph; 1 and 3 would need four graphs.
    limits = {"max_num_seqs": 2, "max_size": 3, "mode": CUDAGraphMode.FULL}
    assert plan_sizes({1: 1, 3: 1}, limits=[Limit(3)], **limits) == (2, 3)


def test_bytes_buy_more_of_the_graphs_that_take_less():
    histogram = {1: 10, 2: 10, 4: 10, 8: 1, 16: 1}
    options = {"max_num_seqs": 4, "max_size": 16}
    both = CUDAGraphMode.FULL_AND_PIECEWISE
    cheap = Limit(43, mixed=10, decode=1, unit="bytes")
    assert plan_sizes(histogram, limits=[cheap], mode=both, **options) == (1, 2, 4, 16)
    dear = Limit(43, mixed=10, decode=12, unit="bytes")
    assert plan_sizes(histogram, limits=[dear], mode=both, **options) == (4, 8, 16)
    with pytest.raises(
        ConfigError, match=r"10 bytes are too few: .* needs 11 for the largest size"
    ):
        plan_sizes(histogram, limits=[Limit(10, 10, 1, "bytes")], mode=both, **options)


def test_the_most_graphs_of_a_limit_are_the_cheapest_that_the_mode_has():
    memory = Limit(100, mixed=10, decode=4, unit="bytes")
    assert memory.graphs(CUDAGraphMode.FULL_AND_PIECEWISE) == 25
    assert memory.graphs(CUDAGraphMode.PIECEWISE) == 10
    assert memory.graphs(CUDAGraphMode.FULL_DECODE_ONLY) == 25
