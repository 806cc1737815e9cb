"""The pool of cache blocks."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kerf_runtime.engine.blocks import BlockPool


def pool_with(total: int, keys: bytes) -> tuple[BlockPool, list[int]]:
    """A pool whose first blocks are owned and have one-byte keys, and those blocks."""
    pool = BlockPool(total=total, block_size=1)
    blocks = pool.take(len(keys))
    for block, key in zip(blocks, keys, strict=True):
        pool.publish(block, bytes([key]))
    return pool, blocks


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


def test_a_free_block_with_a_key_is_found_and_shared() -> None:
    pool, blocks = pool_with(4, b"ab")
    pool.give_back(blocks)
    assert (pool.used, pool.free, pool.cached) == (0, 4, 2)
    found = [block for key in (b"a", b"b") if (block := pool.find(key)) is not None]
    assert found == blocks
    assert pool.free_among(found) == 2
    pool.share(found)
    assert (pool.used, pool.free, pool.free_among(found)) == (2, 2, 0)


def test_a_shared_block_is_free_when_its_last_owner_is_gone() -> None:
    pool, blocks = pool_with(2, b"a")
    pool.share(blocks)
    pool.give_back(blocks)
    assert pool.used == 1
    pool.give_back(blocks)
    assert pool.used == 0


def test_blocks_without_a_key_are_taken_before_those_with_one() -> None:
    pool, blocks = pool_with(3, b"a")
    pool.give_back(blocks)
    assert blocks[0] not in pool.take(2)
    assert pool.find(b"a") == blocks[0]
    assert pool.take(1) == blocks
    assert (pool.find(b"a"), pool.cached) == (None, 0)


def test_what_was_free_longest_is_forgotten_first_and_the_end_of_a_text_before_its_beginning() -> (
    None
):
    pool, (a, b, c, d) = pool_with(4, b"abcd")
    pool.give_back([c, d])
    pool.give_back([a, b])
    assert [pool.take(1)[0] for _ in range(4)] == [d, c, b, a]


def test_use_keeps_a_block_from_being_forgotten() -> None:
    pool, (a, b) = pool_with(2, b"ab")
    pool.give_back([a]), pool.give_back([b])
    pool.share([a]), pool.give_back([a])
    assert pool.take(1) == [b]


def test_the_first_block_with_some_contents_keeps_the_key() -> None:
    pool, [first] = pool_with(2, b"a")
    [second] = pool.take(1)
    pool.publish(second, b"a")
    assert (pool.find(b"a"), pool.cached) == (first, 1)
    pool.give_back([second]), pool.give_back([first])
    assert pool.take(1) == [second]


@given(
    st.lists(st.tuples(st.sampled_from(["take", "share", "free"]), st.integers(0, 5)), max_size=60)
)
def test_blocks_are_neither_lost_nor_handed_out_while_they_are_owned(
    moves: list[tuple[str, int]],
) -> None:
    pool = BlockPool(total=12, block_size=1)
    owners: list[list[int]] = []
    contents: dict[int, bytes] = {}
    for serial, (move, number) in enumerate(moves):
        if move == "take" and number <= pool.free:
            taken = pool.take(number)
            assert not set(taken) & {block for blocks in owners for block in blocks}
            for place, block in enumerate(taken):
                contents[block] = b"%d %d" % (serial, place)
                if place % 2 == 0:
                    pool.publish(block, contents[block])
            owners.append(taken)
        elif move == "share":
            known = [(block, pool.find(key)) for block, key in contents.items()]
            found = [block for block, hit in known if hit is not None][:number]
            assert all(hit in (None, block) for block, hit in known)
            pool.share(found)
            owners.append(found)
        elif move == "free" and owners:
            pool.give_back(owners.pop(number % len(owners)))
        counts = Counter(block for blocks in owners for block in blocks)
        assert pool.used == len(counts)
        assert pool.free + pool.used == 12
        assert pool.free_among(range(12)) == pool.free
        assert pool.cached <= 12
