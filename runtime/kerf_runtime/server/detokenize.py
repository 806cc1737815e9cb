"""From tokens to text while they arrive: multi-byte characters split over tokens, stop strings.

Both classes are pure, and their work is linear in tokens and text.  Whatever the chunking, the pieces they
return join to the text that decoding everything at once would give, up to the first stop string.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

__all__ = ["IncrementalDecoder", "StopMatcher"]

_REPLACEMENT = "\ufffd"
_LONGEST_HOLD = 32
"""Tokens held back at most; a character has 4 bytes, so longer means that the model emits garbage."""

_CONTEXT = 8
"""Tokens of the text before that can change what the first ones after it mean; one would nearly always do."""


class IncrementalDecoder:
    """Decodes a growing list of tokens without decoding it from the start each time.

    Only the end of the list is kept.  The first ``_read`` tokens of it were returned, as ``_known``, but are
    decoded again as left context: some tokenizers drop a leading space, and some merge bytes of several
    tokens.

    Args:
        decode: text of a list of tokens.
        before: tokens of a text that is continued, whose own text is not returned: a word after others
            keeps the space in front of it.
    """

    def __init__(self, decode: Callable[[list[int]], str], before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._read = 0
        self._known = ""
        context = list(before[-_CONTEXT:])
        text = decode(context) if context else ""
        if not text.endswith(_REPLACEMENT):  # else it ends in the middle of a character
            self._ids, self._read, self._known = context, len(context), text

    def push(self, ids: Sequence[int]) -> str:
        """The text that has become certain with these tokens."""
        self._ids.extend(ids)
        return self._take(final=len(self._ids) - self._read > _LONGEST_HOLD)

    def flush(self) -> str:
        """What was held back, at the end of the output."""
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        known, text = self._known, self._decode(self._ids)
        if not text.startswith(known):
            if not final:
                return ""
            known = _common_prefix(known, text)
        if text.endswith(_REPLACEMENT) and not final:
            return ""
        if len(text) > len(known):
            del self._ids[: self._read]
            self._read = len(self._ids)
            self._known = self._decode(self._ids)
        elif final:
            # Tokens without text, such as end tokens that are ignored: kept, they would be decoded again with
            # every token after them.  What was read before them stays the left context.
            del self._ids[self._read :]
        return text[len(known) :]


class StopMatcher:
    """Cuts a text that arrives in pieces at the first stop string.

    The first stop string *to be complete* wins (of two that complete together, the longer), so that
    the result does not depend on how the text was cut into pieces.  The work is linear in the text, however
    long the stop strings are.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._searches = [_Search(stop) for stop in stops]
        self._held: deque[str] = deque()
        self._held_length = 0
        self.stopped = False

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """The text that can be shown now; sets ``stopped`` when a stop string was found.

        Args:
            text: what comes next.
            may_stop: whether a stop string that is complete in it ends the text.  If not, that one is
                passed over, but one that only begins in it can be completed by the next piece.
        """
        if self.stopped:
            return ""
        if not self._searches:
            return text
        before = self._held_length
        self._held.append(text)
        self._held_length += len(text)
        for end, character in enumerate(text, before + 1):
            found = max([search.step(character) for search in self._searches])
            if found and may_stop:
                self.stopped = True
                shown = self._release(end - found)
                self._held.clear()
                self._held_length = 0
                return shown
        return self._release(self._held_length - max(search.length for search in self._searches))

    def flush(self) -> str:
        """What was held back because it might have become a stop string."""
        return self._release(self._held_length)

    def _release(self, length: int) -> str:
        """The first ``length`` characters of what is held, which is no longer."""
        self._held_length -= length
        pieces = []
        while length > 0:
            piece = self._held.popleft()
            if len(piece) > length:
                self._held.appendleft(piece[length:])
                piece = piece[:length]
            pieces.append(piece)
            length -= len(piece)
        return "".join(pieces)


class _Search:
    """Looks for one string in a text that comes character by character (Knuth, Morris and Pratt, 1977).

    Attributes:
        length: of the longest beginning of the string, but not all of it, that the text ends with.
    """

    def __init__(self, wanted: str) -> None:
        self._wanted = wanted
        # Of each beginning that was reached: length of the longest shorter one that it ends with.
        self._borders = [0]
        self.length = 0

    def step(self, character: str) -> int:
        """Length of the string if it is complete with this character, else 0."""
        self.length = self._extended(self.length, character)
        if self.length > len(self._borders):
            self._borders.append(self._extended(self._borders[-1], character))
        if self.length < len(self._wanted):
            return 0
        self.length = self._borders[-1]
        return len(self._wanted)

    def _extended(self, length: int, character: str) -> int:
        """Length of the longest beginning that a text ends with, when it was ``length`` before ``character``."""
        wanted, borders = self._wanted, self._borders
        while length and wanted[length] != character:
            length = borders[length - 1]
        return length + (wanted[length] == character)


def _common_prefix(left: str, right: str) -> str:
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        length += 1
    return left[:length]
