"""What a forward pass needs beside its tensors: the dispatch decision, attention metadata, KV cache.

The engine sets it around every forward; the attention op and the static-graph wrappers read it.
Tensor-shape legend used everywhere: T tokens in the batch (padding included), B sequences, H query
heads, K key/value heads, D head size, N cache blocks, S tokens per block, M blocks per sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kerf_runtime.config.compilation import CUDAGraphMode
from kerf_runtime.cudagraph.descriptor import BatchDescriptor

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AttentionMetadata", "ForwardContext", "get_forward_context", "set_forward_context"]


@dataclass(frozen=True)
class AttentionMetadata:
    """Views of the engine's persistent buffers that describe one batch to attention and to state-space mixers.

    Attributes:
        query_start: int32 [B+1], first token of each sequence in the batch; padding sequences are empty.
        seq_lens: int32 [B], tokens of each sequence including this step's; 0 for padding.
        block_table: int32 [B, M], cache blocks of each sequence.
        slot_mapping: int64 [T], cache slot (block * S + offset) of each token; -1 for padding.
        uniform_decode: every sequence has exactly one query token (padding rows too).
        max_query_len: most tokens that a sequence has in this batch; 0 if unknown.  Known on the host,
            to choose a kernel without waiting for the device.
        query_lens: tokens of each sequence in this batch, known on the host.
        state_slots: int64 [B], where the state of each sequence is; None if the model has none.  Padding
            sequences share a slot that no other has.
    """

    query_start: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    uniform_decode: bool
    max_query_len: int = 0
    query_lens: tuple[int, ...] = ()
    state_slots: Tensor | None = None


@dataclass(frozen=True)
class ForwardContext:
    """Context of one forward.  ``attention`` is None while tracing and profiling: attention gives zeros."""

    mode: CUDAGraphMode = CUDAGraphMode.NONE
    descriptor: BatchDescriptor | None = None
    attention: AttentionMetadata | None = None
    kv_caches: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Layer name -> (key cache, value cache), each [N, S, K, D]."""
    windows: Mapping[str, int] = field(default_factory=dict)
    """Layer name -> tokens, itself included, that a token attends to; all before it in other layers."""
    states: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Name of a state-space layer -> what it keeps of each sequence; see ``engine.state_cache``."""


_current: ForwardContext | None = None


def get_forward_context() -> ForwardContext:
    """The context of the running forward.

    Raises:
        RuntimeError: no forward is running; a model was called outside the engine's runner.
    """
    if _current is None:
        raise RuntimeError("no forward context is set: wrap the call in set_forward_context(...)")
    return _current


class set_forward_context:  # noqa: N801 - used as a function, in every step
    """Make ``context`` the current one for the block; contexts nest."""

    __slots__ = ("_context", "_previous")

    def __init__(self, context: ForwardContext) -> None:
        self._context = context

    def __enter__(self) -> None:
        global _current
        self._previous, _current = _current, self._context

    def __exit__(self, *_: object) -> None:
        global _current
        _current = self._previous
