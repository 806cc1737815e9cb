"""A batch of prompts for models that contain attention, with a KV cache per layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from tests.compilation.passes.layers import HEADS, E

from kerf_runtime.forward_context import AttentionMetadata, ForwardContext, set_forward_context

BLOCK = 16


@contextmanager
def one_prompt(
    count: int,
    layers: Iterable[str],
    *,
    dtype: torch.dtype = torch.bfloat16,
    width: int = E,
    device: str = "cpu",
) -> Iterator[None]:
    """``count`` tokens of one new sequence; every use of the block starts with empty caches."""
    blocks = -(-count // BLOCK)
    metadata = AttentionMetadata(
        query_start=torch.tensor([0, count], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([count], dtype=torch.int32, device=device),
        block_table=torch.arange(blocks, dtype=torch.int32, device=device)[None],
        slot_mapping=torch.arange(count, device=device),
        uniform_decode=count == 1,
        max_query_len=count,
    )
    shape = (blocks, BLOCK, HEADS, width // HEADS)
    caches = {
        name: tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in "kv") for name in layers
    }
    with set_forward_context(ForwardContext(attention=metadata, kv_caches=caches)):
        yield
