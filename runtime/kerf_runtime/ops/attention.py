"""The operator ``kerf::attention``: where the graph is cut, and the only reader of the forward context.

``attention(q, k, v, output!, layer_name)`` stores this step's keys and values in the paged cache and
fills ``output``.  It has an output argument instead of a result, so that a recorded graph on either
side keeps writing to and reading from the same addresses.  The cache itself is no argument, nor is a
sliding window: they are found by ``layer_name`` in the forward context, which keeps pieces of different
layers identical.
With ``output_scale`` the output is float8: attention divided by the scale and clamped.

Without attention metadata in the context (tracing, profiling) the output is zeros.  One
implementation per device type; each gets plain tensors and knows nothing of the context.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache

from torch import Tensor
from torch.library import Library, register_fake

from kerf_runtime.forward_context import get_forward_context

__all__ = ["ATTENTION_SCHEMA"]

ATTENTION_SCHEMA = (
    "attention(Tensor q, Tensor k, Tensor v, Tensor(a!) output, str layer_name, "
    "Tensor? output_scale=None) -> ()"
)

_IMPLEMENTATIONS = {
    "cpu": "kerf_runtime.ops.attention_cpu",
    "cuda": "kerf_runtime.ops.attention_triton",
}

# A module-level owner: the registration lives as long as the Library object.
_library = Library("kerf", "FRAGMENT")
_library.define(ATTENTION_SCHEMA)


@cache
def _paged_attention(device_type: str) -> Callable[..., None]:
    """The implementation for a device type; imported on use, so that a CPU process never imports triton."""
    found: Callable[..., None] = importlib.import_module(
        _IMPLEMENTATIONS[device_type]
    ).paged_attention
    return found


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    layer_name: str,
    output_scale: Tensor | None = None,
) -> None:
    context = get_forward_context()
    if context.attention is None:
        output.zero_()
        return
    attend = _paged_attention(q.device.type)
    caches, window = context.kv_caches[layer_name], context.windows.get(layer_name, 0)
    attend(q, k, v, output, *caches, context.attention, output_scale, window)


_library.impl("attention", _attention, "CPU")
_library.impl("attention", _attention, "CUDA")


@register_fake("kerf::attention", lib=_library)
def _attention_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    layer_name: str,
    output_scale: Tensor | None = None,
) -> None:
    """Nothing to compute: the output argument already has its shape."""
