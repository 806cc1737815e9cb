"""What the engine counts has few series, whatever it runs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kerf_runtime.config.compilation import MAX_SIZE
from kerf_runtime.stats import EXACT_BATCH_TOKENS, NO_SIZE, EngineStats, batch_bucket

tokens = st.integers(1, MAX_SIZE)


@given(tokens)
def test_a_batch_is_counted_under_its_own_number_or_at_most_an_eighth_above(n):
    bucket = batch_bucket(n)
    assert n <= bucket <= n * 9 / 8
    assert bucket == n or n > EXACT_BATCH_TOKENS
    assert batch_bucket(bucket) == bucket


@given(tokens, tokens)
def test_a_larger_batch_is_never_counted_under_a_smaller_number(a, b):
    low, high = sorted((a, b))
    assert batch_bucket(low) <= batch_bucket(high)


def test_all_batches_together_have_568_numbers():
    assert len({batch_bucket(n) for n in range(1, MAX_SIZE + 1)}) == 568


def test_steps_without_a_graph_share_one_size_and_keep_their_batch_size():
    stats = EngineStats()
    for n in (100, 101, 102):
        stats.record_step(mode="NONE", size=n, reason="AboveLargest", real_tokens=n, seconds=0.1)
    stats.record_step(mode="FULL", size=8, reason="Padded", real_tokens=5, seconds=0.1)
    values = stats.to_values(counters={})
    assert values["dispatch"] == [
        ["FULL", 8, "Padded", 1],
        ["NONE", NO_SIZE, "AboveLargest", 3],
    ]
    assert values["batches"] == [[5, 1], [100, 1], [101, 1], [102, 1]]
    assert values["padding_tokens"] == {"NONE": 0, "FULL": 3}
