"""The pool of KV-cache blocks.  Pure, no torch."""

from __future__ import annotations

__all__ = ["BlockPool"]


class BlockPool:
    """Hands out block numbers 0..total-1; a block has one owner at a time.

    Freed blocks are handed out again first: they are the most likely to be in a cache.
    """

    def __init__(self, total: int, block_size: int) -> None:
        """Make a pool of ``total`` blocks of ``block_size`` tokens each."""
        self.total = total
        self.block_size = block_size
        self._free = list(range(total - 1, -1, -1))

    @property
    def free(self) -> int:
        """Blocks without an owner."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks with an owner."""
        return self.total - len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` tokens."""
        return -(-tokens // self.block_size)

    def take(self, count: int) -> list[int]:
        """``count`` blocks for a new owner.

        Raises:
            ValueError: fewer are free; the caller must ask first.
        """
        if count > len(self._free):
            raise ValueError(f"{count} blocks were asked for, {len(self._free)} are free")
        at = len(self._free) - count
        taken, self._free = self._free[at:], self._free[:at]
        return taken[::-1]

    def give_back(self, blocks: list[int]) -> None:
        """Free ``blocks``; their owner must forget them."""
        self._free.extend(reversed(blocks))
