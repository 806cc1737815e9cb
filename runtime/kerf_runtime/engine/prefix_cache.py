"""Reuse of cached keys and values by requests whose tokens begin alike.  Pure, no torch.

The keys and values of a token depend on that token and all before it.  The key of a full block is
therefore a hash of its tokens and of the key of the block before: equal keys mean equal texts from the
first token on.  BLAKE2b with 256 bits makes that true for texts that were chosen to collide, too.  An
engine has one set of weights; if keys and values come to depend on more (an adapter, say), that belongs
into ``ROOT``.

Blocks that are not full, and the block of a request's last token, are never shared: the last token must be
computed to get the next one.  A block is published once a step that fills it has been scheduled, so that
later steps can read it (steps run in order on the device), and never to the same step.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from kerf_runtime.engine.blocks import BlockPool
from kerf_runtime.engine.request import Request

__all__ = ["ROOT", "PrefixCache", "block_key"]

ROOT = b""
"""What the first block of a text follows."""


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a full block, 32 bytes: of its tokens after the text that ``parent`` is the key of."""
    return blake2b(parent + array("I", tokens).tobytes(), digest_size=32).digest()


class PrefixCache:
    """What full blocks of a pool contain, for requests that begin alike.

    Args:
        pool: of blocks.
        enabled: False makes it find and keep nothing.

    Attributes:
        queries: tokens of all requests that were admitted, again after a preemption.
        hits: tokens among them that were found.
    """

    def __init__(self, pool: BlockPool, *, enabled: bool) -> None:
        self._pool = pool
        self._enabled = enabled
        self.queries = 0
        self.hits = 0

    def find(self, request: Request) -> list[int]:
        """The blocks that hold the beginning of a request, in order; its last token is not in them."""
        blocks: list[int] = []
        for key in self._keys(request, self._reusable(request)):
            block = self._pool.find(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def count(self, request: Request, found: Sequence[int]) -> None:
        """Count what an admitted request looked for and found."""
        if self._enabled:
            self.queries += len(request.tokens)
            self.hits += len(found) * self._pool.block_size

    def publish(self, request: Request) -> None:
        """Let others find the full blocks of a running request, as far as its tokens are known."""
        if not self._enabled:
            return
        full = min(request.computed, len(request.tokens)) // self._pool.block_size
        if full > request.published:
            keys = self._keys(request, full)
            for index in range(request.published, full):
                self._pool.publish(request.blocks[index], keys[index])
            request.published = full

    def is_being_filled(
        self, request: Request, found: int, others: Iterable[tuple[Request, int]]
    ) -> bool:
        """Whether the block after those that a request found is filled by others in this very step.

        Args:
            request: that waits.
            found: the number of its blocks that were found.
            others: requests with tokens in this step, and how many of their blocks were full before.
        """
        if found >= self._reusable(request):
            return False
        key = self._keys(request, found + 1)[found]
        size = self._pool.block_size
        for other, before in others:
            full = min(other.computed, len(other.tokens)) // size
            if before <= found < full and self._keys(other, full)[found] == key:
                return True
        return False

    def _reusable(self, request: Request) -> int:
        """Blocks before the one of the last token; none if every token of the prompt is to be told about."""
        whole = request.params.prompt_logprobs and request.generated == 0
        if whole or not self._enabled:
            return 0
        return (len(request.tokens) - 1) // self._pool.block_size

    def _keys(self, request: Request, count: int) -> list[bytes]:
        """Keys of the first ``count`` blocks, which are full of known tokens; computed once."""
        keys, size = request.block_keys, self._pool.block_size
        for index in range(len(keys), count):
            parent = keys[-1] if keys else ROOT
            keys.append(block_key(parent, request.tokens[index * size : (index + 1) * size]))
        return keys[:count] if len(keys) > count else keys
