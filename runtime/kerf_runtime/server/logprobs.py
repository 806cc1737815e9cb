"""Log probabilities in the two wire formats, and single tokens as text and bytes.

A token need not be text: characters may span several tokens, and tokenizers drop the space that a word
starts with when it stands alone.  ``TokenTexts`` undoes both where the tokenizer's own name of the token
allows it.

An answer that echoes long prompts has millions of log probabilities.  They are encoded in blocks, between which
the event loop serves others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec

from kerf_runtime.server.state import ChatTokenizer
from kerf_runtime.server.turns import in_turns

__all__ = ["TokenEntry", "TokenTexts", "chat_logprobs", "completion_logprobs"]

_BLOCK = 64
"""Tokens that are encoded at a time: with 20 alternatives each about a millisecond."""
_REPLACEMENT = "\ufffd"
_BYTE_NAME = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START = "\u2581"


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One token of an answer, or of the prompt that the answer begins with.

    Attributes:
        token_id: the token.
        offset: characters of the text before it.
        logprob: natural logarithm of its probability; None of a prompt's first token, which follows nothing.
        top: likeliest tokens at its place and their logarithms.
    """

    token_id: int
    offset: int
    logprob: float | None
    top: Sequence[tuple[int, float]]


class TokenTexts:
    """Single tokens of one tokenizer as text and as bytes.

    A token that stands alone always has the same text, so that it is decoded once and kept: at most the
    vocabulary, about 200 bytes a token.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes | None]] = {}

    def text(self, token_id: int) -> str:
        """The token's text; ``bytes:\\xNN`` if it is a part of a character."""
        return self._describe(token_id)[0]

    def utf8(self, token_id: int) -> list[int] | None:
        """The token's bytes in UTF-8; None if they cannot be told."""
        data = self._describe(token_id)[1]
        return None if data is None else list(data)

    def _describe(self, token_id: int) -> tuple[str, bytes | None]:
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._decode(token_id)
        return known

    def _decode(self, token_id: int) -> tuple[str, bytes | None]:
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        name = self._tokenizer.token_name(token_id)
        if _REPLACEMENT in text:
            data = None if name is None else _bytes_of_name(name)
            if data is None:
                return text, None
            text = data.decode("utf-8", errors="replace")
            if _REPLACEMENT in text:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            return text, data
        if name is not None and name.startswith(_WORD_START) and not text.startswith(" "):
            text = f" {text}"
        return text, text.encode()


async def chat_logprobs(entries: Sequence[TokenEntry], texts: TokenTexts) -> dict[str, Any]:
    """The ``logprobs`` of a chat choice, to be encoded by ``msgspec``."""

    def token(token_id: int, logprob: float | None) -> dict[str, Any]:
        return {
            "token": texts.text(token_id),
            "logprob": logprob,
            "bytes": texts.utf8(token_id),
        }

    def content(block: Sequence[TokenEntry]) -> dict[str, list[Any]]:
        return {
            "content": [
                {**token(e.token_id, e.logprob), "top_logprobs": [token(*pair) for pair in e.top]}
                for e in block
            ]
        }

    return {**await _encoded(map(content, _blocks(entries)), ["content"]), "refusal": None}


async def completion_logprobs(
    prompt: Sequence[TokenEntry], own: Sequence[TokenEntry], texts: TokenTexts, *, before: int = 0
) -> dict[str, Any]:
    """The ``logprobs`` of a completions choice, to be encoded by ``msgspec``.

    Args:
        prompt: tokens of the prompt, if they are told too.
        own: tokens of the answer.
        texts: of their tokenizer.
        before: characters of the answer in front of its own tokens.
    """
    parts = ((prompt, 0), (own, before))
    rows = (_rows(block, texts, start) for part, start in parts for block in _blocks(part))
    return await _encoded(rows, ["tokens", "token_logprobs", "top_logprobs", "text_offset"])


def _rows(entries: Sequence[TokenEntry], texts: TokenTexts, before: int) -> dict[str, list[Any]]:
    top: list[dict[str, float] | None] = []
    for entry in entries:
        if entry.logprob is None:
            top.append(None)
            continue
        # Different tokens may have the same text: the likeliest keeps it.
        row: dict[str, float] = {}
        for token_id, logprob in entry.top:
            row.setdefault(texts.text(token_id), logprob)
        row.setdefault(texts.text(entry.token_id), entry.logprob)
        top.append(row)
    return {
        "tokens": [texts.text(entry.token_id) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": top,
        "text_offset": [before + entry.offset for entry in entries],
    }


def _blocks(entries: Sequence[TokenEntry]) -> Iterator[Sequence[TokenEntry]]:
    return (entries[at : at + _BLOCK] for at in range(0, len(entries), _BLOCK))


async def _encoded(
    blocks: Iterable[dict[str, list[Any]]], columns: Sequence[str]
) -> dict[str, msgspec.Raw]:
    """Columns that come in blocks, each as one array of JSON."""
    rows = await in_turns(
        [msgspec.json.encode(block[name])[1:-1] for name in columns] for block in blocks
    )
    return {
        name: msgspec.Raw(b"[%b]" % b",".join(row[at] for row in rows))
        for at, name in enumerate(columns)
    }


def _bytes_of_name(name: str) -> bytes | None:
    """Bytes of a token that is no text: ``<0xNN>``, or letters that each stand for a byte."""
    match = _BYTE_NAME.fullmatch(name)
    if match:
        return bytes([int(match.group(1), 16)])
    alphabet = _byte_alphabet()
    if all(letter in alphabet for letter in name):
        return bytes(alphabet[letter] for letter in name)
    return None


@cache
def _byte_alphabet() -> dict[str, int]:
    """The letters of byte-level tokenizers (Radford et al., 2019): printable bytes stand for themselves,
    the others for letters from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = (byte for byte in range(256) if byte not in printable)
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(hidden)}
