"""The pool of KV-cache blocks: who owns them, and which free ones are worth keeping.  Pure, no torch.

A block is owned by as many requests as read it.  One without an owner is free, and may still hold what a
later request needs: a free block whose contents have a key can be found until it is handed out again.
Blocks without a key go first, those freed last before others (they are the most likely to be in a cache
of the processor); then the blocks with a key, those that were freed longest ago before others (LRU).

Contents never change while they have a key.  Owners may therefore share a block and never copy it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

__all__ = ["BlockPool"]


class BlockPool:
    """Hands out block numbers 0..total-1."""

    def __init__(self, total: int, block_size: int) -> None:
        """Make a pool of ``total`` blocks of ``block_size`` tokens each."""
        self.total = total
        self.block_size = block_size
        self._owners = [0] * total
        self._blank = list(range(total - 1, -1, -1))
        """Free and without a key; the last one goes first."""
        self._kept: OrderedDict[int, None] = OrderedDict()
        """Free and with a key; the first one goes first."""
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        """Blocks without an owner."""
        return len(self._blank) + len(self._kept)

    @property
    def used(self) -> int:
        """Blocks with an owner."""
        return self.total - self.free

    @property
    def cached(self) -> int:
        """Blocks that can be found by a key, with or without an owner."""
        return len(self._block_of)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` tokens."""
        return -(-tokens // self.block_size)

    def free_among(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` have no owner: as many fewer are free once they are shared."""
        return sum(self._owners[block] == 0 for block in blocks)

    def take(self, count: int) -> list[int]:
        """``count`` blocks for a new owner; what they held is forgotten.

        Raises:
            ValueError: fewer are free; the caller must ask first.
        """
        if count > self.free:
            raise ValueError(f"{count} blocks were asked for, {self.free} are free")
        taken = [self._blank.pop() for _ in range(min(count, len(self._blank)))]
        while len(taken) < count:
            block, _ = self._kept.popitem(last=False)
            del self._block_of[self._key_of.pop(block)]
            taken.append(block)
        for block in taken:
            self._owners[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Give blocks that were found one more owner."""
        for block in blocks:
            if self._owners[block] == 0:
                del self._kept[block]
            self._owners[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """Take one owner away from ``blocks``, which are in order of position; it must forget them.

        The last block is freed first, so that the end of a text is forgotten before its beginning, without
        which the end could not be found.
        """
        for block in reversed(blocks):
            self._owners[block] -= 1
            if self._owners[block]:
                continue
            if block in self._key_of:
                self._kept[block] = None
            else:
                self._blank.append(block)

    def publish(self, block: int, key: bytes) -> None:
        """Let an owned block be found by ``key``; nothing happens if another has the same contents."""
        if key not in self._block_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def find(self, key: bytes) -> int | None:
        """The block with these contents, or None."""
        return self._block_of.get(key)
