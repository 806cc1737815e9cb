"""Batches for tests of attention, on any device and in any data type, with a float64 reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import kerf_runtime.ops.attention  # noqa: F401  registers the operator
from kerf_runtime.forward_context import AttentionMetadata, ForwardContext, set_forward_context

LAYER = "layers.0.attention"
Implementation = Callable[..., None]


@dataclass
class Case:
    """Sequences with some tokens cached and some new, on shuffled blocks."""

    q: Tensor
    k: Tensor
    v: Tensor
    metadata: AttentionMetadata
    kv_caches: dict[str, tuple[Tensor, Tensor]]
    expected: Tensor
    window: int = 0

    def run(
        self,
        implementation: Implementation | None = None,
        *,
        output_dtype: torch.dtype | None = None,
        output_scale: Tensor | None = None,
    ) -> Tensor:
        """The output, through the operator or by one implementation directly."""
        dtype = output_dtype or self.q.dtype
        output = torch.full(self.q.shape, float("nan"), device=self.q.device).to(dtype)
        if implementation is not None:
            caches = self.kv_caches[LAYER]
            tensors = (self.q, self.k, self.v, output, *caches)
            implementation(*tensors, self.metadata, output_scale, self.window)
            return output
        windows = {LAYER: self.window} if self.window else {}
        context = ForwardContext(attention=self.metadata, kv_caches=self.kv_caches, windows=windows)
        with set_forward_context(context):
            torch.ops.kerf.attention(self.q, self.k, self.v, output, LAYER, output_scale)
        return output


def make_case(
    sequences: list[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    size: int = 16,
    block_size: int = 4,
    padding_tokens: int = 0,
    padding_sequences: int = 0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    unused: float = 0.0,
    window: int = 0,
) -> Case:
    """A batch of (cached tokens, new tokens) per sequence, with what attention should give.

    Everything is computed from values rounded to ``dtype``; ``expected`` is float32 of a float64 result.
    ``unused`` is what cache slots hold that belong to nobody; the new tokens' own slots as well.
    ``window`` is the number of tokens that a token attends to, 0 for all before it.
    """
    random = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, device=device).to(dtype)

    needed = [math.ceil((cached + new) / block_size) for cached, new in sequences]
    order = torch.randperm(sum(needed) + 3, generator=random, device=device).tolist()
    shape = (len(order), block_size, kv_heads, size)
    key_cache, value_cache = (torch.full(shape, unused, dtype=dtype, device=device) for _ in "kv")
    rows = len(sequences) + padding_sequences
    table = torch.zeros(rows, max(needed, default=1) + 1, dtype=torch.int32)
    query_start, seq_lens, slots, qs, ks, vs, expected = [0], [], [], [], [], [], []
    for row, (cached, new) in enumerate(sequences):
        blocks, order = order[: needed[row]], order[needed[row] :]
        table[row, : len(blocks)] = torch.tensor(blocks)
        total = cached + new
        position = torch.arange(total)
        own = torch.tensor(blocks)[position // block_size] * block_size + position % block_size
        place = own.tolist()
        q, k, v = (
            normal(new, heads, size),
            normal(total, kv_heads, size),
            normal(total, kv_heads, size),
        )
        key_cache.view(-1, kv_heads, size)[place[:cached]] = k[:cached]
        value_cache.view(-1, kv_heads, size)[place[:cached]] = v[:cached]
        expected.append(reference(q, k, v, window))
        qs.append(q), ks.append(k[cached:]), vs.append(v[cached:])
        slots += place[cached:]
        query_start.append(query_start[-1] + new)
        seq_lens.append(total)
    qs.append(normal(padding_tokens, heads, size))
    ks.append(normal(padding_tokens, kv_heads, size))
    vs.append(normal(padding_tokens, kv_heads, size))
    expected.append(torch.zeros(padding_tokens, heads, size, device=device))
    uniform = all(new == 1 for _, new in sequences)
    tail = range(query_start[-1] + 1, query_start[-1] + 1 + padding_sequences)
    query_start += list(tail) if uniform else [query_start[-1]] * padding_sequences
    lengths = seq_lens + [0] * padding_sequences
    places = slots + [-1] * padding_tokens
    metadata = AttentionMetadata(
        query_start=torch.tensor(query_start, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_table=table.to(device),
        slot_mapping=torch.tensor(places, dtype=torch.int64, device=device),
        uniform_decode=uniform and padding_tokens == padding_sequences,
        max_query_len=max((new for _, new in sequences), default=1),
    )
    caches = {LAYER: (key_cache, value_cache)}
    new = (torch.cat(qs), torch.cat(ks), torch.cat(vs))
    return Case(*new, metadata, caches, torch.cat(expected), window)


def reference(q: Tensor, k: Tensor, v: Tensor, window: int = 0) -> Tensor:
    """Causal attention of the last tokens of one sequence in float64, a few heads at a time."""
    group = q.shape[1] // k.shape[1]
    positions = torch.arange(len(k) - len(q), len(k), device=q.device)[:, None]
    keys = torch.arange(len(k), device=q.device)[None, :]
    hidden = keys > positions
    if window:
        hidden |= keys <= positions - window
    parts = []
    for head in range(k.shape[1]):
        wide_q = q[:, head * group : (head + 1) * group].double()
        scores = torch.einsum("qhd,kd->hqk", wide_q, k[:, head].double()) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        parts.append(torch.einsum("hqk,kd->qhd", weights, v[:, head].double()))
    return torch.cat(parts, dim=1).float()


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over norm of the reference; not a number where anything is."""
    difference = (found.float() - expected).norm()
    return float(difference / expected.norm().clamp_min(1e-30))
