"""From a number of tokens to the captured size that holds it.  Pure, no torch."""

from __future__ import annotations

from bisect import bisect_left

__all__ = ["PaddedSizes"]


class PaddedSizes:
    """Maps every token count to the smallest captured size that holds it.

    Args:
        sizes: captured sizes, any order.
    """

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = tuple(sorted(set(sizes)))
        top = self.sizes[-1] if self.sizes else 0
        self._table = (
            [self.sizes[bisect_left(self.sizes, n)] for n in range(top + 1)] if top else [0]
        )

    @property
    def largest(self) -> int:
        """Largest captured size; 0 without any."""
        return self.sizes[-1] if self.sizes else 0

    def padded(self, num_tokens: int) -> int | None:
        """Smallest captured size of at least ``num_tokens``; None above the largest."""
        if num_tokens > self.largest:
            return None
        return self._table[num_tokens]
