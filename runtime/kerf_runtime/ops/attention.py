"""The operator ``kerf::attention``: where the graph is cut, and the only reader of the forward context.

``attention(q, k, v, output!, layer_name)`` stores this step's keys and values in the paged cache and
fills ``output``.  It has an output argument instead of a result, so that a recorded graph on either
side keeps writing to and reading from the same addresses.  The cache itself is no argument: it is
found by ``layer_name`` in the forward context, which keeps pieces of different layers identical.
With ``output_scale`` the output is float8: attention divided by the scale and clamped.

Without attention metadata in the context (tracing, profiling) the output is zeros.  One
implementation per device type; each gets plain tensors and knows nothing of the context.
"""

from __future__ import annotations

from torch import Tensor
from torch.library import Library, register_fake

from kerf_runtime.forward_context import get_forward_context
from kerf_runtime.ops.attention_cpu import paged_attention as cpu_paged_attention

__all__ = ["ATTENTION_SCHEMA"]

ATTENTION_SCHEMA = (
    "attention(Tensor q, Tensor k, Tensor v, Tensor(a!) output, str layer_name, "
    "Tensor? output_scale=None) -> ()"
)

# A module-level owner: the registration lives as long as the Library object.
_library = Library("kerf", "FRAGMENT")
_library.define(ATTENTION_SCHEMA)


def _attention_cpu(
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
    key_cache, value_cache = context.kv_caches[layer_name]
    cpu_paged_attention(q, k, v, output, key_cache, value_cache, context.attention, output_scale)


def _attention_cuda(
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
    # Imported on use: a CPU process never imports triton.
    from kerf_runtime.ops.attention_triton import paged_attention

    key_cache, value_cache = context.kv_caches[layer_name]
    paged_attention(q, k, v, output, key_cache, value_cache, context.attention, output_scale)


_library.impl("attention", _attention_cpu, "CPU")
_library.impl("attention", _attention_cuda, "CUDA")


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
