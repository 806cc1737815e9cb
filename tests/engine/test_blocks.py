"""The pool of cache blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kerf_runtime.engine.blocks import BlockPool


def test_blocks_round_up() -> None:
    pool = BlockPool(total=8, block_size=16)
    assert [pool.blocks_for(tokens) for tokens in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]


def test_more_than_the_free_blocks_cannot_be_taken() -> None:
    pool = BlockPool(total=3, block_size=1)
    pool.take(2)
    with pytest.raises(ValueError, match="2 blocks were asked for, 1 are free"):
        pool.take(2)
    assert pool.free == 1


def test_blocks_freed_last_are_taken_first() -> None:
    pool = BlockPool(total=4, block_size=1)
    first = pool.take(2)
    pool.give_back(first)
    assert pool.take(2) == first


@given(st.lists(st.integers(0, 5), max_size=30))
def test_no_block_is_ever_handed_out_twice(sizes: list[int]) -> None:
    pool = BlockPool(total=12, block_size=1)
    owned: list[list[int]] = []
    for size in sizes:
        if size <= pool.free:
            owned.append(pool.take(size))
        elif owned:
            pool.give_back(owned.pop(0))
        held = [block for blocks in owned for block in blocks]
        assert len(held) == len(set(held)) == pool.used
        assert pool.free + pool.used == 12
