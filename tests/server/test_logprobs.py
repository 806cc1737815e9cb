"""Single tokens as text and bytes, whatever the tokenizer calls them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kerf_runtime.server.logprobs import TokenEntry, TokenTexts, chat_logprobs, completion_logprobs


@dataclass
class Words:
    """A tokenizer of which only single tokens matter: name and decoded text."""

    words: list[tuple[str | None, str]]

    def decode(self, ids, skip_special_tokens=True):
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
    assert completion_logprobs([entry], texts)["top_logprobs"] == [{"a": -0.5, "c": -3.0}]
    tops = chat_logprobs([entry], texts)["content"][0]["top_logprobs"]
    assert [(top["token"], top["logprob"]) for top in tops] == [("a", -0.5), ("a", -1.0)]
