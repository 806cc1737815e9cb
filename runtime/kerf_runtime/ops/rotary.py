"""The operator ``kerf::rotary_embedding``: rotate the heads of queries or keys (Su et al., 2021).

Dimension i of a head is paired with i + D/2 (the Hugging Face convention).  Products and differences are
rounded to the data type of ``x`` one by one, as the separate ATen operators do.  The native function is
the one definition of the numbers; see ``ops.quant``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import Library, register_fake

__all__ = ["rotary_embedding_native"]


def rotary_embedding_native(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, H, D] by the angles of cos and sin [T, 1, D/2] -> contiguous [T, H, D]."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def _check(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    torch._check(
        x.dtype is cos.dtype and x.dtype is sin.dtype,
        lambda: (
            f"x, cos and sin must share one data type, found {x.dtype}, {cos.dtype}, {sin.dtype}"
        ),
    )
    torch._check(
        x.dim() == 3 and cos.shape[-1] * 2 == x.shape[-1] and sin.shape[-1] * 2 == x.shape[-1],
        lambda: f"cos {list(cos.shape)} and sin {list(sin.shape)} do not fit x {list(x.shape)}",
    )


# A module-level owner: the registration lives as long as the Library object.
_library = Library("kerf", "FRAGMENT")
_library.define("rotary_embedding(Tensor x, Tensor cos, Tensor sin) -> Tensor")


def _rotary_cpu(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    _check(x, cos, sin)
    return rotary_embedding_native(x, cos, sin).contiguous()


def _rotary_cuda(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    from kerf_runtime.ops.triton import rotary  # Triton is for processes that run on a GPU only

    _check(x, cos, sin)
    return rotary.rotary_embedding(x, cos, sin)


_library.impl("rotary_embedding", _rotary_cpu, "CPU")
_library.impl("rotary_embedding", _rotary_cuda, "CUDA")


@register_fake("kerf::rotary_embedding", lib=_library)
def _rotary_fake(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    _check(x, cos, sin)
    return x.new_empty(x.shape)
