"""Every token count goes to the smallest captured size that holds it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kerf_runtime.cudagraph.sizes import PaddedSizes

sizes = st.lists(st.integers(1, 300), max_size=20).map(tuple)


@given(sizes, st.integers(1, 400))
def test_the_padded_size_is_the_smallest_that_holds_the_tokens(sizes, tokens):
    fitting = [size for size in sizes if size >= tokens]
    assert PaddedSizes(sizes).padded(tokens) == (min(fitting) if fitting else None)


@given(sizes.filter(bool))
def test_every_captured_size_is_its_own_padded_size(sizes):
    table = PaddedSizes(sizes)
    assert [table.padded(size) for size in sizes] == list(sizes)
    assert table.largest == max(sizes)
    assert table.padded(table.largest + 1) is None


def test_without_sizes_nothing_is_padded():
    table = PaddedSizes(())
    assert table.largest == 0
    assert table.padded(1) is None
