"""Single tokens as text and bytes, whatever the tokenizer calls them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field

import msgspec
import pytest

from kerf_runtime.server.logprobs import TokenEntry, TokenTexts, chat_logprobs, completion_logprobs


def wire(logprobs):
    """What a client reads of log probabilities."""
    return json.loads(msgspec.json.encode(asyncio.run(logprobs)))


@dataclass
class Words:
    """A tokenizer of which only single tokens matter: name and decoded text."""

    words: list[tuple[str | None, str]]
    decoded: list[int] = field(default_factory=list)

    def decode(self, ids, skip_special_tokens=True):
        self.decoded += ids
        return "".join(self.words[i][1] for i in ids)

    def token_name(self, token_id):
        return self.words[token_id][0]

    def encode(self, text, add_special_tokens=True):
        raise NotImplementedError

    def apply_chat_template(self, messages, add_generation_prompt=True):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("name", "decoded", "text", "data"),
    [
        ("Hello", "Hello", "Hello", b"Hello"),
        ("ĠHello", " Hello", " Hello", b" Hello"),
        ("▁Hello", "Hello", " Hello", b" Hello"),
        ("▁", "", " ", b" "),
        ("<0xE2>", "\ufffd", "bytes:\\xe2", b"\xe2"),
        ("Ã", "\ufffd", "bytes:\\xc3", b"\xc3"),
        ("ðŁĮ", "\ufffd", "bytes:\\xf0\\x9f\\x8c", b"\xf0\x9f\x8c"),
        ("Ġâ", " \ufffd", "bytes:\\x20\\xe2", b" \xe2"),
        ("\ufffd", "\ufffd", "\ufffd", None),
        (None, "\ufffd", "\ufffd", None),
        (None, "", "", b""),
    ],
)
def test_a_token_as_text_and_bytes(name, decoded, text, data):
    texts = TokenTexts(Words([(name, decoded)]))
    assert texts.text(0) == text
    assert texts.utf8(0) == (None if data is None else list(data))


def test_tokens_with_the_same_text_do_not_hide_the_likelier():
    texts = TokenTexts(Words([("a", "a"), ("b", "a"), ("c", "c")]))
    entry = TokenEntry(token_id=2, offset=0, logprob=-3.0, top=[(0, -0.5), (1, -1.0)])
    assert wire(completion_logprobs([], [entry], texts))["top_logprobs"] == [{"a": -0.5, "c": -3.0}]
    tops = wire(chat_logprobs([entry], texts))["content"][0]["top_logprobs"]
    assert [(top["token"], top["logprob"]) for top in tops] == [("a", -0.5), ("a", -1.0)]


def test_a_token_is_decoded_once_however_often_it_is_told():
    tokenizer = Words([("a", "a"), ("b", "b"), ("Ã", "\ufffd")])
    texts = TokenTexts(tokenizer)
    entries = [TokenEntry(at % 3, at, -1.0, [(0, -0.5), (1, -1.0)]) for at in range(300)]
    for _ in range(2):
        asyncio.run(completion_logprobs(entries, entries, texts))
        asyncio.run(chat_logprobs(entries, texts))
    assert sorted(tokenizer.decoded) == [0, 1, 2]


@pytest.mark.parametrize("count", [0, 1, 64, 200])
def test_blocks_join_to_the_whole(count):
    texts = TokenTexts(Words([("a", "a"), ("b", "b")]))
    prompt = [TokenEntry(0, at, -0.1 * at if at else None, [(1, -2.0)]) for at in range(count)]
    own = [TokenEntry(1, at, -1.0, []) for at in range(count)]
    first, rest = prompt[:1], prompt[1:]
    assert wire(completion_logprobs(prompt, own, texts, before=count)) == {
        "tokens": ["a"] * count + ["b"] * count,
        "token_logprobs": [e.logprob for e in prompt] + [-1.0] * count,
        "top_logprobs": [None for _ in first]
        + [{"b": -2.0, "a": e.logprob} for e in rest]
        + [{"b": -1.0}] * count,
        "text_offset": list(range(2 * count)),
    }
    told = wire(chat_logprobs(own, texts))
    assert told["content"] == [
        {"token": "b", "logprob": -1.0, "bytes": [98], "top_logprobs": []} for _ in own
    ]
    assert told["refusal"] is None
