"""Keys of blocks, and what is found by them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kerf_runtime.engine.blocks import BlockPool
from kerf_runtime.engine.messages import SamplingParams
from kerf_runtime.engine.prefix_cache import ROOT, PrefixCache, block_key
from kerf_runtime.engine.request import Request

SIZE = 4

texts = st.lists(st.integers(0, 3), min_size=0, max_size=12)


def make_request(tokens: list[int], pool: BlockPool | None = None) -> Request:
    """A request; with a pool it is running and everything is computed."""
    request = Request(
        request_id="r",
        tokens=tokens,
        prompt_length=len(tokens),
        params=SamplingParams(max_tokens=9),
        stop_ids=frozenset(),
        seed=0,
        arrived=0.0,
        place=(0.0, 0),
        max_length=len(tokens) + 9,
    )
    if pool is not None:
        request.blocks = pool.take(pool.blocks_for(len(tokens)))
        request.computed = len(tokens)
    return request


def key_of(text: list[int]) -> bytes:
    key = ROOT
    for start in range(0, len(text), SIZE):
        key = block_key(key, text[start : start + SIZE])
    return key


@given(texts, texts)
def test_keys_are_equal_exactly_if_the_texts_are(a: list[int], b: list[int]) -> None:
    a, b = a[: len(a) // SIZE * SIZE], b[: len(b) // SIZE * SIZE]
    assert (key_of(a) == key_of(b)) == (a == b)


def test_large_token_ids_have_keys_of_their_own() -> None:
    ids = [0, 1, 255, 256, 65536, 2**24, 2**31, 2**32 - 1]
    assert len({block_key(ROOT, [token]) for token in ids}) == len(ids)


def test_the_leading_full_blocks_are_found() -> None:
    pool = BlockPool(total=16, block_size=SIZE)
    prefixes = PrefixCache(pool, enabled=True)
    first = make_request(list(range(10)), pool)
    prefixes.publish(first)
    assert prefixes.find(make_request(list(range(12)))) == first.blocks[:2]
    assert prefixes.find(make_request([*range(7), 99, 99])) == first.blocks[:1]
    assert prefixes.find(make_request([99, *range(9)])) == []


def test_the_block_of_the_last_token_is_not_found() -> None:
    pool = BlockPool(total=16, block_size=SIZE)
    prefixes = PrefixCache(pool, enabled=True)
    first = make_request(list(range(8)), pool)
    prefixes.publish(first)
    assert prefixes.find(make_request(list(range(8)))) == first.blocks[:1]
    assert prefixes.find(make_request(list(range(9)))) == first.blocks[:2]


def test_tokens_that_are_not_computed_or_not_known_are_not_published() -> None:
    pool = BlockPool(total=16, block_size=SIZE)
    prefixes = PrefixCache(pool, enabled=True)
    request = make_request(list(range(11)), pool)
    request.computed = 7
    prefixes.publish(request)
    assert (pool.cached, request.published) == (1, 1)
    request.computed, request.pending = 12, 1
    prefixes.publish(request)
    assert (pool.cached, request.published) == (2, 2)
    request.tokens.append(11)
    prefixes.publish(request)
    assert (pool.cached, request.published) == (3, 3)


def test_what_another_request_fills_in_the_same_step_is_noticed() -> None:
    pool = BlockPool(total=16, block_size=SIZE)
    prefixes = PrefixCache(pool, enabled=True)
    other = make_request(list(range(10)), pool)
    same, different = make_request(list(range(9))), make_request([*range(7), 99, 99])
    assert prefixes.is_being_filled(same, 0, [(other, 0)])
    assert prefixes.is_being_filled(same, 1, [(other, 0)])
    assert not prefixes.is_being_filled(same, 2, [(other, 0)]), "nothing more is of use"
    assert not prefixes.is_being_filled(same, 0, [(other, 1)]), "it was full before"
    assert not prefixes.is_being_filled(different, 1, [(other, 0)])


def test_lookups_are_counted_in_tokens() -> None:
    pool = BlockPool(total=16, block_size=SIZE)
    prefixes = PrefixCache(pool, enabled=True)
    first, second = make_request(list(range(10)), pool), make_request(list(range(12)))
    prefixes.count(first, [])
    prefixes.publish(first)
    prefixes.count(second, prefixes.find(second))
    assert (prefixes.queries, prefixes.hits) == (22, 8)


def test_a_prompt_whose_log_probabilities_are_wanted_is_computed_whole() -> None:
    pool = BlockPool(total=16, block_size=SIZE)
    prefixes = PrefixCache(pool, enabled=True)
    first = make_request(list(range(10)), pool)
    prefixes.publish(first)
    request = make_request(list(range(10)))
    request.params = SamplingParams(max_tokens=9, prompt_logprobs=True)
    assert prefixes.find(request) == []
    request.tokens.append(1)
    assert prefixes.find(request) == first.blocks[:2], "they were told with the first token"


def test_a_cache_that_is_switched_off_keeps_and_finds_nothing() -> None:
    pool = BlockPool(total=16, block_size=SIZE)
    prefixes = PrefixCache(pool, enabled=False)
    request = make_request(list(range(10)), pool)
    prefixes.publish(request)
    prefixes.count(request, [])
    assert prefixes.find(make_request(list(range(10)))) == []
    assert not prefixes.is_being_filled(make_request(list(range(10))), 0, [(request, 0)])
    assert (pool.cached, prefixes.queries, request.block_keys) == (0, 0, [])
