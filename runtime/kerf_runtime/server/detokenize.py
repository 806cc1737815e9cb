"""From tokens to text while they arrive: multi-byte characters split over tokens, stop strings.

Both classes are pure.  Whatever the chunking, the pieces they return join to the text that decoding
everything at once would give, up to the first stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["IncrementalDecoder", "StopMatcher"]

_REPLACEMENT = "\ufffd"
_LONGEST_HOLD = 32
"""Tokens held back at most; a character has 4 bytes, so longer means that the model emits garbage."""


class IncrementalDecoder:
    """Decodes a growing list of tokens without decoding it from the start each time.

    Tokens before ``_anchor`` are done.  Those from ``_anchor`` to ``_read`` were returned, but are decoded
    again as left context: some tokenizers drop a leading space, and some merge bytes of several tokens.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._anchor = 0
        self._read = 0

    def push(self, ids: Sequence[int]) -> str:
        """The text that has become certain with these tokens."""
        self._ids.extend(ids)
        return self._take(final=len(self._ids) - self._read > _LONGEST_HOLD)

    def flush(self) -> str:
        """What was held back, at the end of the output."""
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        known = self._decode(self._ids[self._anchor : self._read])
        text = self._decode(self._ids[self._anchor :])
        if not text.startswith(known):
            if not final:
                return ""
            known = _common_prefix(known, text)
        if text.endswith(_REPLACEMENT) and not final:
            return ""
        if len(text) > len(known):
            self._anchor, self._read = self._read, len(self._ids)
        return text[len(known) :]


class StopMatcher:
    """Cuts a text that arrives in pieces at the first stop string.

    The first stop string *to be complete* wins (of two that complete together, the longer), so that
    the result does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that can be shown now; sets ``stopped`` when a stop string was found."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        self._held += text
        matches = [(at + len(s), at) for s in self._stops if (at := self._held.find(s)) >= 0]
        if matches:
            self.stopped = True
            shown = self._held[: min(matches)[1]]
            self._held = ""
            return shown
        keep = max(_overlap(self._held, stop) for stop in self._stops)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        """What was held back because it might have become a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of ``stop`` that ends ``text``."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def _common_prefix(left: str, right: str) -> str:
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        length += 1
    return left[:length]
