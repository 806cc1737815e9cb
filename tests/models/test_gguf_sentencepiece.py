"""SentencePiece BPE tokenizers out of GGUF files, against the sentencepiece package."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.models.checkpoints import make_llama, write_gguf
from tokenizers import Tokenizer as Backend

from kerf_runtime.errors import ModelError
from kerf_runtime.models import Tokenizer, load_tokenizer, read_model_config
from kerf_runtime.models.gguf_tokenizer import tokenizer_from_gguf
from kerf_runtime.server.detokenize import IncrementalDecoder

CONTROL = ["<unk>", "<s>", "</s>", "<|turn|>"]
USER_DEFINED = ["<tool>", "<tool>s", "o."]
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Pair:
    """One vocabulary, read by sentencepiece and by us from a GGUF file."""

    theirs: sentencepiece.SentencePieceProcessor
    ours: Tokenizer
    path: Path


def train(*, prefix: bool) -> sentencepiece.SentencePieceProcessor:
    """2,000 pieces with the settings of Llama 2, in 0.2 s."""
    docs = Path(__file__).parents[2] / "docs"
    lines = [line for path in sorted(docs.glob("*.md")) for line in path.read_text().splitlines()]
    lines += [
        "日本語のテキスト naïve café über 😀😁",
        "if x:\n        y(  )",
        "aaaaaaa abababa",
    ] * 20
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=2000,
        hard_vocab_limit=False,
        byte_fallback=True,
        character_coverage=0.999,
        normalization_rule_name="identity",
        add_dummy_prefix=prefix,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        control_symbols=CONTROL[3:],
        user_defined_symbols=USER_DEFINED,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def metadata_of(theirs: sentencepiece.SentencePieceProcessor, **changes: Any) -> dict[str, Any]:
    """What a GGUF file says of a vocabulary."""
    ids = range(theirs.get_piece_size())
    tokens = [theirs.id_to_piece(i) for i in ids]

    def kind(i: int) -> int:
        special = 2 if theirs.is_unknown(i) else 3 if theirs.is_control(i) else 0
        return special or (6 if theirs.is_byte(i) else 4 if tokens[i] in USER_DEFINED else 1)

    values = {
        "model": "llama",
        "tokens": tokens,
        "scores": [theirs.get_score(i) for i in ids],
        "token_type": [kind(i) for i in ids],
        "bos_token_id": theirs.bos_id(),
        "unknown_token_id": theirs.unk_id(),
        **changes,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


def make_pair(folder: Path, *, prefix: bool, **changes: Any) -> Pair:
    theirs = train(prefix=prefix)
    path = write_gguf(
        folder / "m.gguf",
        make_llama(vocab_size=theirs.get_piece_size(), num_hidden_layers=1),
        extra={**metadata_of(theirs, **changes), "tokenizer.chat_template": TEMPLATE},
    )
    return Pair(theirs, load_tokenizer(path), path)


@pytest.fixture(scope="session")
def llama2(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """As Llama 2 has it: a space before every text."""
    return make_pair(tmp_path_factory.mktemp("llama2"), prefix=True)


@pytest.fixture(scope="session")
def unprefixed(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Without the space before a text; the file also names its way to cut texts."""
    return make_pair(
        tmp_path_factory.mktemp("plain"), prefix=False, add_space_prefix=False, pre="default"
    )


@pytest.fixture(params=["llama2", "unprefixed"])
def pair(request: pytest.FixtureRequest) -> Pair:
    found: Pair = request.getfixturevalue(request.param)
    return found


SAMPLES = [
    "",
    " ",
    "Hello world",
    "   leading and trailing   ",
    "\n\n\tTabs\r\nand lines\n",
    "日本語 naïve café cafe\u0301 😀😁👩‍👩‍👧 \u2603 \U0001f98a",
    "\u2581already\u2581 \u2581",
    "<0x41> is no byte, \ufffd no error",
    "call <tool>s and <tool> then go.o.",
    "<tool> first",
    "\x00\x7f\u0080\U0010ffff",
    "aaaaaaaaaaaaa abababababab",
]
_PIECES = [
    "the",
    " the",
    "compil",
    "aab",
    "  ",
    "    ",
    "\n",
    "😀",
    "é",
    "日本",
    "o",
    ".",
    "<",
    "▁",
]
TEXTS = st.lists(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    | st.text("abo. <tl>s", max_size=12)
    | st.sampled_from([*_PIECES, *USER_DEFINED, *SAMPLES])
).map("".join)
TEXTS = TEXTS.filter(lambda text: text not in USER_DEFINED and not any(c in text for c in CONTROL))


@pytest.mark.parametrize("text", SAMPLES)
def test_the_tokens_are_those_of_sentencepiece(pair: Pair, text: str) -> None:
    ids = pair.theirs.encode(text)
    assert pair.ours.encode(text, False) == ids
    assert pair.ours.encode(text) == [1, *ids]
    assert pair.ours.decode([1, *ids, 2]) == pair.theirs.decode(ids) == text.replace("▁", " ")


def assert_the_same(pair: Pair, text: str) -> None:
    ids = pair.theirs.encode(text)
    assert pair.ours.encode(text, False) == ids
    assert pair.ours.decode(ids) == text.replace("▁", " ")


@settings(max_examples=300)
@given(TEXTS)
def test_the_tokens_of_any_text_are_those_of_sentencepiece(llama2: Pair, text: str) -> None:
    assert_the_same(llama2, text)


@settings(max_examples=200)
@given(TEXTS)
def test_so_they_are_without_a_space_before_the_text(unprefixed: Pair, text: str) -> None:
    assert_the_same(unprefixed, text)


IDS = st.lists(st.integers(1, 300) | st.integers(7, 262) | st.integers(1, 1900), max_size=30)
"""Control tokens, broken characters and pieces, as a model may write them."""


@given(IDS)
def test_the_text_of_any_tokens_is_that_of_sentencepiece(both: list[Pair], ids: list[int]) -> None:
    for pair in both:
        assert pair.ours.decode(ids) == pair.theirs.decode(ids)


@pytest.fixture(scope="session")
def both(llama2: Pair, unprefixed: Pair) -> list[Pair]:
    return [llama2, unprefixed]


@given(IDS, st.data())
def test_streamed_pieces_join_to_the_text(
    both: list[Pair], ids: list[int], data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=8).map(sorted))
    for pair in both:
        decoder = IncrementalDecoder(pair.ours.decode)
        parts = [decoder.push(ids[a:b]) for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
        assert "".join(parts) + decoder.flush() == pair.ours.decode(ids)


@given(IDS, IDS)
def test_a_text_goes_on_as_if_it_had_been_decoded_at_once(
    both: list[Pair], first: list[int], then: list[int]
) -> None:
    for pair in both:
        whole, before = pair.ours.decode([*first, *then]), pair.ours.decode(first)
        if before.endswith("\ufffd"):
            continue  # the next token may complete the character
        decoder = IncrementalDecoder(pair.ours.decode, first)
        shown = "".join(decoder.push([token]) for token in then) + decoder.flush()
        assert before + shown == whole


def test_an_answer_that_goes_on_with_a_text_keeps_the_space_between(llama2: Pair) -> None:
    word = llama2.theirs.piece_to_id("▁the")
    for before, text in (([word], " the"), ([], "the")):
        decoder = IncrementalDecoder(llama2.ours.decode, before)
        assert decoder.push([word]) + decoder.flush() == text


def test_a_character_that_was_streamed_stays_when_the_next_one_is_cut_off(llama2: Pair) -> None:
    snowman, fox = "\u2603", "\U0001f98a"
    ids = llama2.ours.encode(snowman + fox, False)
    assert len(ids) == 1 + 3 + 4, "bytes, or the test tests nothing"
    decoder = IncrementalDecoder(llama2.ours.decode)
    shown = [decoder.push([token]) for token in ids[:-1]]
    assert shown == ["", "", "", snowman, "", "", ""]
    assert decoder.flush() == "\ufffd" * 3


def test_only_the_space_of_a_piece_is_dropped(llama2: Pair) -> None:
    space = llama2.theirs.piece_to_id("<0x20>")
    word = llama2.theirs.piece_to_id("▁the")
    for ids, text in (([space, word], "  the"), ([word, word], "the the"), ([1, word], "the")):
        assert llama2.ours.decode(ids) == llama2.theirs.decode(ids) == text


def test_a_conversation_becomes_the_tokens_that_the_model_was_trained_on(llama2: Pair) -> None:
    prompt = llama2.ours.apply_chat_template(
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Yes?"},
            {"role": "user", "content": "  Go on\n"},
        ]
    )
    turns = [
        llama2.theirs.encode(t) for t in ("[INST] Hi [/INST] Yes? ", "[INST]   Go on\n [/INST]")
    ]
    assert llama2.ours.encode(prompt, False) == [1, *turns[0], 2, 1, *turns[1]]


def test_an_answer_ends_with_the_token_of_the_file(llama2: Pair) -> None:
    assert llama2.ours.eos_token_ids == read_model_config(llama2.path).eos_token_ids == (2,)
    assert llama2.ours.bos_token_id == 1
    assert llama2.ours.vocab_size == llama2.theirs.get_piece_size()
    ids = llama2.ours.encode("yes</s>", False)
    assert ids[-1] == 2
    assert llama2.ours.decode(ids) == "yes"
    assert llama2.ours.decode(ids, skip_special_tokens=False) == "yes</s>"


def test_a_text_of_one_word_that_users_defined_is_that_word(pair: Pair) -> None:
    """SentencePiece would put a space before it, which the library cannot."""
    [token] = pair.ours.encode("<tool>", False)
    assert token == pair.theirs.piece_to_id("<tool>")
    assert pair.ours.decode([token]) == "<tool>"


BYTES = [f"<0x{value:02X}>" for value in range(256)]


def vocabulary(*pieces: tuple[str, float, int], **changes: Any) -> dict[str, Any]:
    """Metadata with the usual special tokens, all bytes and some pieces: text, score, kind."""
    rows = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    rows += [(name, 0.0, 6) for name in BYTES]
    rows += pieces
    values: dict[str, Any] = {
        "model": "llama",
        "tokens": [row[0] for row in rows],
        "scores": [row[1] for row in rows],
        "token_type": [row[2] for row in rows],
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


LETTERS = [(letter, -9.0, 1) for letter in "▁abc"]


def as_tokens(metadata: dict[str, Any], text: str) -> list[str]:
    backend: Backend = tokenizer_from_gguf(metadata, where="f")
    tokens: list[str] = backend.encode(text).tokens
    return tokens


@pytest.mark.parametrize(
    ("scores", "tokens"),
    [
        ({"ab": -1, "bc": -2}, ["ab", "c"]),
        ({"ab": -2, "bc": -1}, ["a", "bc"]),
        ({"bc": -1, "ab": -1}, ["a", "bc"]),
        ({"ab": -1, "bc": -2, "abc": -3}, ["abc"]),
        ({"bc": -2, "abc": -1}, ["abc"]),
        ({"abc": -1}, ["a", "b", "c"]),
    ],
    ids=str,
)
def test_the_pair_with_the_best_score_is_joined_first(
    scores: dict[str, float], tokens: list[str]
) -> None:
    pieces = [(text, float(score), 1) for text, score in scores.items()]
    assert as_tokens(vocabulary(*LETTERS, *pieces), "abc") == ["<s>", "▁", *tokens]


def test_the_leftmost_of_the_same_pairs_is_joined_first() -> None:
    assert as_tokens(vocabulary(*LETTERS, ("aa", -1.0, 1)), "aaa")[2:] == ["aa", "a"]


@pytest.mark.parametrize("kind", [2, 3, 5, 6])
def test_only_pieces_of_text_come_of_joining(kind: int) -> None:
    pieces = ("ab", -1.0, 1), ("abc", -2.0, kind)
    metadata = vocabulary(*LETTERS, *pieces, add_bos_token=False)
    special = kind in (2, 3)
    assert as_tokens(metadata, "abc") == (["abc"] if special else ["▁", "ab", "c"])
    assert as_tokens(metadata, "a b") == ["▁", "a", "▁", "b"]


def test_an_unused_token_has_a_text_all_the_same() -> None:
    metadata = vocabulary(*LETTERS, ("[PAD]", -1000.0, 5))
    backend = tokenizer_from_gguf(metadata, where="f")
    assert backend.get_vocab_size() == len(metadata["tokenizer.ggml.tokens"])
    assert backend.decode([backend.token_to_id("[PAD]")]) == "[PAD]"


def test_without_bytes_what_is_unknown_is_one_token() -> None:
    rows = [("<unk>", 0.0, 2), *LETTERS]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [row[0] for row in rows],
        "tokenizer.ggml.scores": [row[1] for row in rows],
        "tokenizer.ggml.token_type": [row[2] for row in rows],
    }
    assert as_tokens(metadata, "a猫犬b") == ["▁", "a", "<unk>", "b"]


def test_first_and_last_tokens_are_added_as_the_file_says() -> None:
    def encode(**changes: Any) -> list[str]:
        return as_tokens(vocabulary(*LETTERS, **changes), "a")

    assert encode() == ["<s>", "▁", "a"], "the default of this kind"
    assert encode(add_bos_token=False, add_eos_token=True) == ["▁", "a", "</s>"]
    assert encode(add_space_prefix=False) == ["<s>", "a"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "llama-bpe"}, r"pre: pre-tokenizer 'llama-bpe' is not supported\. Supported: default"),
        ({"tokens": []}, "tokens: the file has no vocabulary"),
        ({"scores": [0.0]}, "scores: there are 1 values for 263 tokens"),
        ({"token_type": None}, "token_type: there are 0 values for 263 tokens"),
        ({"token_type": [2, 3, 3, *[6] * 254, *[1] * 6]}, "lacks 2 of 256 bytes, such as <0xFE>, <0xFF>"),
        ({"token_type": [1] * 263}, "neither bytes nor a token for what is unknown"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces: .* changes texts"),
        ({"precompiled_charsmap": [1, 2]}, "precompiled_charsmap: .* changes texts"),
    ],
)  # fmt: skip
def test_a_tokenizer_that_would_be_wrong_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        tokenizer_from_gguf(vocabulary(*LETTERS, **changes), where="model.gguf")
    assert str(caught.value).startswith("model.gguf: tokenizer.ggml.")
