"""Text that arrives in pieces joins to what decoding and cutting at once would give."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.server.fakes import END, ByteTokenizer

from kerf_runtime.server.detokenize import IncrementalDecoder, StopMatcher

TOKENIZER = ByteTokenizer()


def cut(items, sizes):
    """``items`` in pieces of the given sizes; the rest as one piece."""
    pieces, at = [], 0
    for size in sizes:
        pieces.append(items[at : at + size])
        at += size
    return [*pieces, items[at:]]


def decode_in_pieces(tokens, sizes):
    decoder = IncrementalDecoder(TOKENIZER.decode)
    return [*(decoder.push(piece) for piece in cut(tokens, sizes)), decoder.flush()]


SIZES = st.lists(st.integers(0, 5), max_size=60)


@given(st.text(max_size=60), SIZES)
def test_any_text_in_any_pieces_joins_to_the_text(text, sizes):
    assert "".join(decode_in_pieces(list(text.encode()), sizes)) == text


@given(st.lists(st.integers(0, 256), max_size=30), SIZES)
def test_any_tokens_in_any_pieces_join_to_what_decoding_them_at_once_gives(tokens, sizes):
    assert "".join(decode_in_pieces(tokens, sizes)) == TOKENIZER.decode(tokens)


@given(st.text(min_size=1, max_size=40), SIZES)
def test_no_piece_of_valid_text_contains_a_replacement_character(text, sizes):
    text = text.replace("\ufffd", "")
    assert not any("\ufffd" in piece for piece in decode_in_pieces(list(text.encode()), sizes))


def test_half_a_character_is_held_back_until_the_other_half_comes():
    decoder = IncrementalDecoder(TOKENIZER.decode)
    first, second, third = "€".encode()
    assert decoder.push([first]) == ""
    assert decoder.push([second]) == ""
    assert decoder.push([third]) == "€"


def test_endless_garbage_is_not_held_back_for_ever():
    decoder = IncrementalDecoder(TOKENIZER.decode)
    shown = "".join(decoder.push([0xE2]) for _ in range(100))
    assert len(shown) >= 60


def test_a_tokenizer_that_drops_leading_spaces_loses_none_in_the_middle():
    words = {1: " the", 2: " cat", 3: " sat"}

    def decode(ids):
        return "".join(words[i] for i in ids).removeprefix(" ")

    decoder = IncrementalDecoder(decode)
    assert [decoder.push([1]), decoder.push([2]), decoder.push([3])] == ["the", " cat", " sat"]


def test_a_decoder_that_takes_text_back_never_repeats_it():
    # Byte-fallback tokenizers turn a whole run of bytes into replacement characters while it is cut.
    whole = "你好".encode()

    def decode(ids):
        data = bytes(ids)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(data)

    decoder = IncrementalDecoder(decode)
    assert "".join([*(decoder.push([byte]) for byte in whole), decoder.flush()]) == "你好"


@given(st.lists(st.tuples(st.characters(codec="utf-8"), st.integers(0, 70)), max_size=5), SIZES)
def test_tokens_without_text_are_nowhere_in_it(characters, sizes):
    tokens = [t for char, ends in characters for t in [*char.encode(), *[END] * ends]]
    shown = "".join(decode_in_pieces(tokens, sizes))
    assert shown == "".join(char for char, _ in characters)


def test_tokens_without_text_are_not_decoded_again_for_ever():
    decoded = 0

    def decode(ids):
        nonlocal decoded
        decoded += len(ids)
        return TOKENIZER.decode(ids)

    decoder, count = IncrementalDecoder(decode), 5_000
    shown = [decoder.push([token]) for token in [ord("a"), *[END] * count, ord("b")]]
    assert "".join(shown) == "ab"
    assert decoded < 40 * count


def test_tokens_without_text_do_not_take_the_place_of_the_left_context():
    words = {1: " the", 2: " cat", END: ""}

    def decode(ids):
        return "".join(words[i] for i in ids).removeprefix(" ")

    decoder = IncrementalDecoder(decode)
    assert "".join(decoder.push([token]) for token in [1, *[END] * 100, 2]) == "the cat"


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)


@given(st.text("abc", max_size=30), STOPS, SIZES)
def test_cutting_at_stop_strings_does_not_depend_on_the_pieces(text, stops, sizes):
    def run(pieces):
        matcher = StopMatcher(stops)
        shown = "".join(matcher.push(piece) for piece in pieces)
        return (shown if matcher.stopped else shown + matcher.flush()), matcher.stopped

    at_once = run([text])
    assert run(cut(text, sizes)) == at_once
    assert run(list(text)) == at_once
    shown, stopped = at_once
    assert text.startswith(shown)
    assert stopped == any(stop in text for stop in stops)
    assert not any(stop in shown for stop in stops)


@pytest.mark.parametrize(
    ("stops", "shown"),
    [(["bc"], "a"), (["abcd", "bc"], "a"), (["x"], "abcd"), (["abcd", "cd"], "")],
)
def test_the_first_complete_stop_string_wins_and_is_not_shown(stops, shown):
    matcher = StopMatcher(stops)
    assert matcher.push("abcd") + matcher.flush() == shown


def test_text_that_cannot_become_a_stop_string_is_shown_at_once():
    matcher = StopMatcher(["###"])
    assert matcher.push("one #") == "one "
    assert matcher.push("two") == "#two"


@given(st.text("abc", max_size=30), STOPS, st.integers(0, 30))
def test_a_stop_string_counts_if_its_end_does(text, stops, allowed):
    """``allowed`` is the number of characters that a stop string may not end in."""
    found = (
        (end, max(len(s) for s in ended))
        for end in range(allowed + 1, len(text) + 1)
        if (ended := [s for s in stops if text[:end].endswith(s)])
    )
    end, length = next(found, (None, 0))
    matcher, shown = StopMatcher(stops), ""
    for at, char in enumerate(text):
        shown += matcher.push(char, may_stop=at >= allowed)
        if not matcher.stopped:
            before = text[: at + 1]
            starts = {s[:n] for s in stops for n in range(len(s))}
            assert len(before) - len(shown) == max(
                (len(start) for start in starts if before.endswith(start)), default=0
            )
    assert matcher.stopped == (end is not None)
    assert shown + matcher.flush() == (text if end is None else text[: end - length])


def test_a_long_stop_string_that_almost_came_costs_no_more_than_its_length():
    class Counting(str):
        read = 0

        def __getitem__(self, at):
            found = super().__getitem__(at)
            Counting.read += len(found)
            return found

    stop = Counting("a" * 5_000 + "b")
    matcher = StopMatcher([stop])
    text = "a" * 8_000 + "c" + "a" * 4_000
    assert "".join(map(matcher.push, text)) + matcher.flush() == text
    assert Counting.read < 8 * len(text)
