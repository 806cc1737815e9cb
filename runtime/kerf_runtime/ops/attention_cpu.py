"""Paged attention on the CPU, in plain PyTorch: the reference that other devices are compared with.

Shapes: T tokens, H query heads, K key/value heads, G = H / K, D head size, B sequences, L keys.
Sequences with one query token (decode) are computed together; longer ones (prefill chunks) one by one.
Query heads that share a key head are treated as G query rows of it, so keys are never repeated.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kerf_runtime.forward_context import AttentionMetadata

__all__ = ["paged_attention"]


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    output_scale: Tensor | None = None,
    window: int = 0,
) -> None:
    """Store ``k`` and ``v`` in the cache, then attend causally over each sequence's cached tokens.

    Args:
        q: [T, H, D].
        k: [T, K, D], this step's keys.
        v: [T, K, D], this step's values.
        output: [T, H, D], overwritten; rows of padding become zeros.  float8_e4m3fn with a scale.
        key_cache: [N, S, K, D].
        value_cache: [N, S, K, D].
        metadata: of the batch; padding sequences come after all real ones.
        output_scale: float32 [1]; the result is divided by it and clamped.
        window: tokens, itself included, that a token attends to; 0 for all before it.
    """
    if output_scale is not None:
        wide = torch.empty_like(q)
        paged_attention(q, k, v, wide, key_cache, value_cache, metadata, window=window)
        limit = torch.finfo(output.dtype).max
        output.copy_((wide.float() / output_scale).clamp(-limit, limit))
        return
    _store(k, v, key_cache, value_cache, metadata.slot_mapping)
    count = int((metadata.seq_lens > 0).sum())
    starts = metadata.query_start[: count + 1].tolist()
    output[starts[-1] :].zero_()
    if count == 0:
        return
    seq_lens = metadata.seq_lens[:count]
    lengths = seq_lens.tolist()
    decode = [i for i in range(count) if starts[i + 1] - starts[i] == 1]
    if len(decode) == count:
        table = metadata.block_table[:count]
        output[:count] = _decode(q[:count], key_cache, value_cache, table, seq_lens, window)
        return
    if decode:
        rows = torch.tensor([starts[i] for i in decode])
        sequences = torch.tensor(decode)
        table = metadata.block_table[sequences]
        output[rows] = _decode(q[rows], key_cache, value_cache, table, seq_lens[sequences], window)
    for i in range(count):
        first, last = starts[i], starts[i + 1]
        if last - first > 1:
            keys = _gather(key_cache, metadata.block_table[i : i + 1], lengths[i])[0]
            values = _gather(value_cache, metadata.block_table[i : i + 1], lengths[i])[0]
            output[first:last] = _prefill(q[first:last], keys, values, window)


def _store(k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    real = slots >= 0
    if not bool(real.all()):
        slots, k, v = slots[real], k[real], v[real]
    key_cache.view(-1, *key_cache.shape[2:])[slots] = k
    value_cache.view(-1, *value_cache.shape[2:])[slots] = v


def _gather(cache: Tensor, block_table: Tensor, length: int) -> Tensor:
    """The first ``length`` cached tokens of each sequence: [B, length, K, D]."""
    size = cache.shape[1]
    blocks = block_table[:, : -(-length // size)].long()
    return cache[blocks].flatten(1, 2)[:, :length]


def _decode(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    window: int,
) -> Tensor:
    """One query token per sequence: [B, H, D] -> [B, H, D]."""
    batch, heads, size = q.shape
    kv_heads = key_cache.shape[2]
    longest = int(seq_lens.max())
    keys = _gather(key_cache, block_table, longest).transpose(1, 2)
    values = _gather(value_cache, block_table, longest).transpose(1, 2)
    positions, lengths = torch.arange(longest), seq_lens[:, None]
    mask = positions < lengths
    if window:
        mask &= positions >= lengths - window
    mask = mask[:, None, None, :]
    grouped = q.view(batch, kv_heads, heads // kv_heads, size)
    return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).reshape(q.shape)


def _prefill(q: Tensor, keys: Tensor, values: Tensor, window: int) -> Tensor:
    """The last Q tokens of one sequence: [Q, H, D] with keys [L, K, D] -> [Q, H, D]."""
    queries, length = q.shape[0], keys.shape[0]
    # Row i stands at position length - queries + i and sees every key up to itself.
    mask = torch.ones(queries, length, dtype=torch.bool).tril(length - queries)
    if window:
        mask = mask.triu(length - queries - window + 1)
    return F.scaled_dot_product_attention(
        q.transpose(0, 1),
        keys.transpose(0, 1),
        values.transpose(0, 1),
        attn_mask=mask,
        enable_gqa=True,
    ).transpose(0, 1)
