"""The tensors that hold what state-space layers keep of running requests, one slot each.

A state has a fixed size and is overwritten by every step, so there is nothing of it to share, to grow or to
page: a request owns a slot while it runs.  Slot 0 is nobody's: rows of padding and batches that are made up
write there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kerf_runtime.models.config import ModelConfig

__all__ = ["PADDING_SLOT", "allocate_states", "state_cache_bytes"]

PADDING_SLOT = 0
"""Requests have the slots from 1 on."""


def state_cache_bytes(config: ModelConfig, max_num_seqs: int, itemsize: int) -> int:
    """Bytes of all slots in all layers; 0 for a model without state-space layers.

    Args:
        config: of the model.
        max_num_seqs: requests that can run together.
        itemsize: bytes of one number of the model's data type.
    """
    shape = config.state_shape
    return 0 if shape is None else (max_num_seqs + 1) * shape.bytes_per_sequence(itemsize)


def allocate_states(
    layers: Sequence[str],
    config: ModelConfig,
    *,
    slots: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Mapping[str, tuple[Tensor, Tensor]]:
    """The last inputs of the convolution and the state of each layer, zeroed.

    Args:
        layers: their names.
        config: of the model.
        slots: with that of padding, one more than requests can run together.
        dtype: of the model.
        device: where the model is.

    Returns:
        Layer -> ``dtype`` [slots, taps, channels] and float32 [slots, heads, head_dim, columns]; see
        ``models.config.StateShape``.
    """
    shape = config.state_shape
    if shape is None:
        return {}
    inputs = (slots, shape.taps, shape.channels)
    state = (slots, shape.heads, shape.head_dim, shape.columns)
    return {
        layer: (
            torch.zeros(inputs, dtype=dtype, device=device),
            torch.zeros(state, dtype=torch.float32, device=device),
        )
        for layer in layers
    }
